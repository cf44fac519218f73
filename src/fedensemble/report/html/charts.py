"""The charts of the report, each with a legend and its values as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from ..palette import LIGHT
from ..seed_curves import visible_range
from .svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Format,
    Scale,
    axes,
    drawing,
    format_number,
    number,
    path,
    scale,
    tag,
)

MOST = 200  # points of a line; more could not be distinguished
COLOURS, DASHES = len(LIGHT), 4


@dataclass(frozen=True)
class Chart:
    """A drawing with its legend, its note and its table of values."""

    ident: str
    title: str
    svg: Markup
    header: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    legend: Sequence[tuple[str, str]] = ()  # names and CSS classes
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Line:
    """Values over the chart's x, with a band from `low` to `high`; no legend without a name."""

    name: str
    values: Sequence[float]
    style: str
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())


def line_style(index: int) -> str:
    """The CSS classes of a line: a colour, and dashes if there are more lines than colours."""
    return f"c{index % COLOURS} d{index // COLOURS % DASHES}"


def downsample_indices(count: int, most: int = MOST) -> list[int]:
    """At most `most` evenly spaced indices below `count`, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def line_chart(
    ident: str,
    title: str,
    x: Sequence[float],
    lines: Sequence[Line],
    *,
    xlabel: str,
    ylabel: str,
    shown: Format = format_number,
    tooltip: Sequence[tuple[str, Sequence[str]]] | None = None,
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """Lines over rounds; `tooltip` replaces the values shown in the tooltip and the table."""
    across = scale(x, LEFT, WIDTH - RIGHT, room=0.02)
    series = [part for line in lines for part in (line.values, line.low, line.high)]
    if from_zero:
        up = scale([0.0, *(v for part in series for v in part)], HEIGHT - BOTTOM, TOP)
        up = Scale(0.0, up.high, up.start, up.end)
    else:
        shown_range, everything = visible_range(series)
        up = scale(shown_range, HEIGHT - BOTTOM, TOP)
        note += "" if everything else " The first rounds are outside the range shown."
    # The entry of the legend that each line belongs to: a line without a name, to that before it.
    entries = [sum(bool(line.name) for line in lines[: at + 1]) - 1 for at in range(len(lines))]
    parts: list[Markup] = []
    for line, entry in zip(lines, entries, strict=True):
        if line.low:
            edge = [*zip(x, line.high, strict=True), *reversed(list(zip(x, line.low, strict=True)))]
            outline = path((across(a), up(b)) for a, b in edge if math.isfinite(b))
            band = f"band {line.style}" + " faint" * (len(lines) > COLOURS)
            parts.append(tag("path", d=f"{outline}Z", class_=band, data_series=entry))
    for line, entry in zip(lines, entries, strict=True):
        if not line.values:
            continue
        points = [(across(a), up(b)) for a, b in zip(x, line.values, strict=True)]
        parts.append(tag("path", d=path(points), class_=f"line {line.style}", data_series=entry))
        if len(points) == 1 and math.isfinite(points[0][1]):
            x0, y0 = points[0]
            dot = tag("circle", cx=x0, cy=y0, r=3, class_=f"dot {line.style}", data_series=entry)
            parts.append(dot)
    clip = tag(
        "clipPath",
        tag("rect", x=LEFT, y=TOP - 4, width=across.end - LEFT + 4, height=up.start - TOP + 4),
        id=f"clip-{ident}",
    )
    if tooltip is None:
        tooltip = [
            (line.name, [shown(v) if math.isfinite(v) else "–" for v in line.values])
            for line in lines
            if line.name and line.values
        ]
    labels = [format_number(value) for value in x]
    hover = {
        "kind": "x",
        "at": [round(across(a), 1) for a in x],
        "top": TOP,
        "bottom": up.start,
        "label": [f"{xlabel} {label}" for label in labels],
        "rows": tooltip,
    }
    content = [
        axes(across, up, xlabel, ylabel, _integer_label),
        clip,
        tag("g", *parts, clip_path=f"url(#clip-{ident})"),
    ]
    rows = [(label, *(values[at] for _, values in tooltip)) for at, label in enumerate(labels)]
    return Chart(
        ident,
        title,
        drawing(ident, title, content, hover),
        (xlabel, *(name for name, _ in tooltip)),
        rows,
        [
            (line.name, f"{'line' if line.values else 'band'} {line.style}")
            for line in lines
            if line.name
        ],
        note.strip(),
    )


def _integer_label(value: float) -> str:
    """The label of a tick at an integer, else empty: rounds are integers."""
    return format_number(value) if value == int(value) else ""


@dataclass(frozen=True)
class Bars:
    """The heights of one group of bars."""

    name: str
    values: Sequence[float]
    style: str


def bar_chart(
    ident: str,
    title: str,
    edges: Sequence[float],
    groups: Sequence[Bars],
    *,
    xlabel: str,
    ylabel: str,
    over: Sequence[Markup] = (),
    up: Scale | None = None,
    tooltip: Sequence[Sequence[str]] | None = None,
    header: tuple[str, ...] = (),
    legend: Sequence[tuple[str, str]] = (),
    shown: Format = format_number,
    names: Sequence[str] = (),
    note: str = "",
) -> Chart:
    """Bars between edges, later groups in front of earlier ones; `over` is drawn on top.

    Without `names`, a bar is called by its edges.
    """
    across = Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    highest = max((value for group in groups for value in group.values), default=0) or 1
    up = up or Scale(0.0, 1.06 * highest, HEIGHT - BOTTOM, TOP)
    parts = []
    for group in groups:
        for at, value in enumerate(group.values):
            left, right = across(edges[at]), across(edges[at + 1])
            if value > 0:
                parts.append(
                    tag(
                        "rect",
                        x=left + 0.5,
                        y=up(value),
                        width=max(right - left - 1, 0.5),
                        height=up.start - up(value),
                        class_=f"bar {group.style}",
                    )
                )
    names = names or [
        f"{format_number(float(f'{a:.3g}'))} to {format_number(float(f'{b:.3g}'))}"
        for a, b in pairwise(edges)
    ]
    tooltip = tooltip or [[shown(group.values[at]) for group in groups] for at in range(len(names))]
    header = header or tuple(group.name for group in groups)
    boxes = [
        [round(across(a), 1), TOP, round(across(b) - across(a), 1), up.start - TOP]
        for a, b in pairwise(edges)
    ]
    text = [
        "\n".join([f"{xlabel} {name}", *(f"{h}: {v}" for h, v in zip(header, values, strict=True))])
        for name, values in zip(names, tooltip, strict=True)
    ]
    content = [axes(across, up, xlabel, ylabel), *parts, *over]
    rows = [(name, *values) for name, values in zip(names, tooltip, strict=True)]
    keys = [(group.name, f"bar {group.style}") for group in groups]
    return Chart(
        ident,
        title,
        drawing(ident, title, content, {"kind": "bar", "boxes": boxes, "text": text}),
        (xlabel, *header),
        rows,
        [*keys, *legend],
        note,
    )


@dataclass(frozen=True)
class Point:
    """A dot and its tooltip."""

    x: float
    y: float
    text: str
    style: str = "c0"
    reach: float = 0.0  # half the length of a vertical bar through the dot


def point_chart(
    ident: str,
    title: str,
    points: Sequence[Point],
    *,
    xlabel: str,
    ylabel: str,
    across: Scale,
    up: Scale,
    over: Sequence[Markup] = (),
    radius: float = 3.0,
    header: tuple[str, ...] = (),
    rows: Sequence[Sequence[str]] = (),
    legend: Sequence[tuple[str, str]] = (),
    xformat: Format = format_number,
    note: str = "",
) -> Chart:
    """Dots in a plane, with vertical bars where a point has a `reach`."""
    parts, boxes = [], []
    for point in points:
        x, y = across(point.x), up(point.y)
        if point.reach:
            parts.append(
                tag(
                    "path",
                    d=f"M{number(x)} {number(up(point.y - point.reach))}V"
                    f"{number(up(point.y + point.reach))}",
                    class_=f"reach {point.style}",
                )
            )
        parts.append(tag("circle", cx=x, cy=y, r=radius, class_=f"dot {point.style}"))
        boxes.append(
            [round(x - radius - 1, 1), round(y - radius - 1, 1), 2 * radius + 2, 2 * radius + 2]
        )
    content = [axes(across, up, xlabel, ylabel, xformat=xformat), *over, *parts]
    hover = {"kind": "point", "boxes": boxes, "text": [point.text for point in points]}
    return Chart(ident, title, drawing(ident, title, content, hover), header, rows, legend, note)
