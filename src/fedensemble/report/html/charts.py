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

MAX_POINTS = 200  # points of a line; more could not be distinguished
COLORS, DASHES = len(LIGHT), 4


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
    """The CSS classes of a line: a color, and dashes if there are more lines than colors."""
    return f"c{index % COLORS} d{index // COLORS % DASHES}"


def downsample_indices(count: int, max_count: int = MAX_POINTS) -> list[int]:
    """At most `max_count` evenly spaced indices below `count`, including the first and the last."""
    if count <= max_count:
        return list(range(count))
    return sorted({round(index * (count - 1) / (max_count - 1)) for index in range(max_count)})


def line_chart(
    ident: str,
    title: str,
    x: Sequence[float],
    lines: Sequence[Line],
    *,
    xlabel: str,
    ylabel: str,
    format_value: Format = format_number,
    tooltip: Sequence[tuple[str, Sequence[str]]] | None = None,
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """Lines over rounds; `tooltip` replaces the values shown in the tooltip and the table."""
    x_scale = scale(x, LEFT, WIDTH - RIGHT, margin=0.02)
    series = [part for line in lines for part in (line.values, line.low, line.high)]
    if from_zero:
        y_scale = scale([0.0, *(v for part in series for v in part)], HEIGHT - BOTTOM, TOP)
        y_scale = Scale(0.0, y_scale.high, y_scale.start, y_scale.end)
    else:
        shown_range, everything = visible_range(series)
        y_scale = scale(shown_range, HEIGHT - BOTTOM, TOP)
        note += "" if everything else f" The first {xlabel}s are outside the range shown."
    # The entry of the legend that each line belongs to: a line without a name, to that before it.
    entries = [sum(bool(line.name) for line in lines[: at + 1]) - 1 for at in range(len(lines))]
    parts: list[Markup] = []
    for line, entry in zip(lines, entries, strict=True):
        if line.low:
            edge = [*zip(x, line.high, strict=True), *reversed(list(zip(x, line.low, strict=True)))]
            outline = path((x_scale(a), y_scale(b)) for a, b in edge if math.isfinite(b))
            band = f"band {line.style}" + " faint" * (len(lines) > COLORS)
            parts.append(tag("path", d=f"{outline}Z", class_=band, data_series=entry))
    for line, entry in zip(lines, entries, strict=True):
        if not line.values:
            continue
        points = [(x_scale(a), y_scale(b)) for a, b in zip(x, line.values, strict=True)]
        parts.append(tag("path", d=path(points), class_=f"line {line.style}", data_series=entry))
        if len(points) == 1 and math.isfinite(points[0][1]):
            x0, y0 = points[0]
            dot = tag("circle", cx=x0, cy=y0, r=3, class_=f"dot {line.style}", data_series=entry)
            parts.append(dot)
    clip = tag(
        "clipPath",
        tag(
            "rect", x=LEFT, y=TOP - 4, width=x_scale.end - LEFT + 4, height=y_scale.start - TOP + 4
        ),
        id=f"clip-{ident}",
    )
    if tooltip is None:
        tooltip = [
            (line.name, [format_value(v) if math.isfinite(v) else "–" for v in line.values])
            for line in lines
            if line.name and line.values
        ]
    labels = [format_number(value) for value in x]
    hover = {
        "kind": "x",
        "at": [round(x_scale(a), 1) for a in x],
        "top": TOP,
        "bottom": y_scale.start,
        "label": [f"{xlabel} {label}" for label in labels],
        "rows": tooltip,
    }
    content = [
        axes(x_scale, y_scale, xlabel, ylabel, _integer_label),
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
    overlay: Sequence[Markup] = (),
    y_scale: Scale | None = None,
    tooltip: Sequence[Sequence[str]] | None = None,
    header: tuple[str, ...] = (),
    legend: Sequence[tuple[str, str]] = (),
    format_value: Format = format_number,
    names: Sequence[str] = (),
    note: str = "",
) -> Chart:
    """Bars between edges, later groups in front of earlier ones; `overlay` is drawn on top.

    Without `names`, a bar is labeled by its bin edges.
    """
    x_scale = Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    highest = max((value for group in groups for value in group.values), default=0) or 1
    y_scale = y_scale or Scale(0.0, 1.06 * highest, HEIGHT - BOTTOM, TOP)
    parts = []
    for group in groups:
        for at, value in enumerate(group.values):
            left, right = x_scale(edges[at]), x_scale(edges[at + 1])
            if value > 0:
                parts.append(
                    tag(
                        "rect",
                        x=left + 0.5,
                        y=y_scale(value),
                        width=max(right - left - 1, 0.5),
                        height=y_scale.start - y_scale(value),
                        class_=f"bar {group.style}",
                    )
                )
    names = names or [
        f"{format_number(float(f'{a:.3g}'))} to {format_number(float(f'{b:.3g}'))}"
        for a, b in pairwise(edges)
    ]
    tooltip = tooltip or [
        [format_value(group.values[at]) for group in groups] for at in range(len(names))
    ]
    header = header or tuple(group.name for group in groups)
    boxes = [
        [round(x_scale(a), 1), TOP, round(x_scale(b) - x_scale(a), 1), y_scale.start - TOP]
        for a, b in pairwise(edges)
    ]
    text = [
        "\n".join([f"{xlabel} {name}", *(f"{h}: {v}" for h, v in zip(header, values, strict=True))])
        for name, values in zip(names, tooltip, strict=True)
    ]
    content = [axes(x_scale, y_scale, xlabel, ylabel), *parts, *overlay]
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
    half_height: float = 0.0  # half the length of a vertical bar through the dot


def point_chart(
    ident: str,
    title: str,
    points: Sequence[Point],
    *,
    xlabel: str,
    ylabel: str,
    x_scale: Scale,
    y_scale: Scale,
    overlay: Sequence[Markup] = (),
    radius: float = 3.0,
    header: tuple[str, ...] = (),
    rows: Sequence[Sequence[str]] = (),
    legend: Sequence[tuple[str, str]] = (),
    xformat: Format = format_number,
    note: str = "",
) -> Chart:
    """Dots in a plane, with vertical bars where a point has a `half_height`."""
    parts, boxes = [], []
    for point in points:
        x, y = x_scale(point.x), y_scale(point.y)
        if point.half_height:
            parts.append(
                tag(
                    "path",
                    d=f"M{number(x)} {number(y_scale(point.y - point.half_height))}V"
                    f"{number(y_scale(point.y + point.half_height))}",
                    class_=f"reach {point.style}",
                )
            )
        parts.append(tag("circle", cx=x, cy=y, r=radius, class_=f"dot {point.style}"))
        boxes.append(
            [round(x - radius - 1, 1), round(y - radius - 1, 1), 2 * radius + 2, 2 * radius + 2]
        )
    content = [axes(x_scale, y_scale, xlabel, ylabel, xformat=xformat), *overlay, *parts]
    hover = {"kind": "point", "boxes": boxes, "text": [point.text for point in points]}
    return Chart(ident, title, drawing(ident, title, content, hover), header, rows, legend, note)
