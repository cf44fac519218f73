"""The kinds of drawing the report has, each with a legend and its numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

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
    number,
    path,
    plain,
    scale,
    tag,
)

MOST = 200  # points of a line: more cannot be seen
COLOURS, DASHES = 7, 4


@dataclass(frozen=True)
class Chart:
    """A drawing, and what belongs to it."""

    ident: str
    title: str
    svg: Markup
    header: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    legend: Sequence[tuple[str, str]] = ()  # names and classes
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Line:
    """Values over the chart's x; a band goes from `low` to `high`. Without a name it is in no
    legend.
    """

    name: str
    values: Sequence[float]
    style: str
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())


def look(index: int) -> str:
    """The style of a line: a colour, and dashes when colours run out."""
    return f"c{index % COLOURS} d{index // COLOURS % DASHES}"


def thin(count: int, most: int = MOST) -> list[int]:
    """Places of at most `most` of `count` things, the first and the last among them."""
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
    shown: Format = plain,
    told: Sequence[tuple[str, Sequence[str]]] | None = None,
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """Lines over rounds; `told` replaces the lines' values in the tooltip and the table."""
    across = scale(x, LEFT, WIDTH - RIGHT, room=0.02)
    whole = [
        v
        for line in lines
        for part in (line.values, line.low, line.high)
        for v in part
        if math.isfinite(v)
    ]
    kept = whole if from_zero else _settled(lines, whole)
    up = scale([0.0, *kept] if from_zero else kept, HEIGHT - BOTTOM, TOP)
    up = Scale(0.0, up.high, up.start, up.end) if from_zero else up
    if kept is not whole:
        note = f"{note} The first rounds run out of the picture.".strip()
    parts: list[Markup] = []
    for line in lines:
        if line.low:
            edge = [*zip(x, line.high, strict=True), *reversed(list(zip(x, line.low, strict=True)))]
            around = path((across(a), up(b)) for a, b in edge if math.isfinite(b))
            parts.append(tag("path", d=f"{around}Z", class_=f"band {line.style}"))
    for line in (line for line in lines if line.values):
        points = [(across(a), up(b)) for a, b in zip(x, line.values, strict=True)]
        parts.append(tag("path", d=path(points), class_=f"line {line.style}"))
        if len(points) == 1 and math.isfinite(points[0][1]):
            parts.append(
                tag("circle", cx=points[0][0], cy=points[0][1], r=3, class_=f"dot {line.style}")
            )
    clip = tag(
        "clipPath",
        tag("rect", x=LEFT, y=TOP - 4, width=across.end - LEFT + 4, height=up.start - TOP + 4),
        id=f"clip-{ident}",
    )
    if told is None:
        told = [
            (line.name, [shown(v) if math.isfinite(v) else "–" for v in line.values])
            for line in lines
            if line.name and line.values
        ]
    labels = [plain(value) for value in x]
    hover = {
        "kind": "x",
        "at": [round(across(a), 1) for a in x],
        "top": TOP,
        "bottom": up.start,
        "label": [f"{xlabel} {label}" for label in labels],
        "rows": told,
    }
    inside = [
        axes(across, up, xlabel, ylabel, _whole),
        clip,
        tag("g", *parts, clip_path=f"url(#clip-{ident})"),
    ]
    rows = [(label, *(values[at] for _, values in told)) for at, label in enumerate(labels)]
    return Chart(
        ident,
        title,
        drawing(ident, title, inside, hover),
        (xlabel, *(name for name, _ in told)),
        rows,
        [
            (line.name, f"{'line' if line.values else 'band'} {line.style}")
            for line in lines
            if line.name
        ],
        note,
    )


def _whole(value: float) -> str:
    """Rounds are whole numbers."""
    return plain(value) if value == int(value) else ""


def _settled(lines: Sequence[Line], whole: list[float]) -> list[float]:
    """Values to make room for: the first rounds' too, unless they would squeeze the rest into a
    corner.
    """
    parts = [part for line in lines for part in (line.values, line.low, line.high)]
    later = [v for part in parts for v in part[len(part) // 4 :] if math.isfinite(v)]
    if not later or max(whole) - min(whole) <= 2.5 * (max(later) - min(later)):
        return whole
    room = 0.5 * (max(later) - min(later))
    return [max(min(later) - room, min(whole)), min(max(later) + room, max(whole))]


@dataclass(frozen=True)
class Bars:
    """Heights of a histogram's bars."""

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
    told: Sequence[Sequence[str]] | None = None,
    header: tuple[str, ...] = (),
    legend: Sequence[tuple[str, str]] = (),
    shown: Format = plain,
    note: str = "",
) -> Chart:
    """Bars between edges, one group before the other; `over` is drawn on top."""
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
    names = [
        f"{plain(float(f'{a:.3g}'))} to {plain(float(f'{b:.3g}'))}" for a, b in pairwise(edges)
    ]
    told = told or [[shown(group.values[at]) for group in groups] for at in range(len(names))]
    header = header or tuple(group.name for group in groups)
    boxes = [
        [round(across(a), 1), TOP, round(across(b) - across(a), 1), up.start - TOP]
        for a, b in pairwise(edges)
    ]
    text = [
        "\n".join([f"{xlabel} {name}", *(f"{h}: {v}" for h, v in zip(header, values, strict=True))])
        for name, values in zip(names, told, strict=True)
    ]
    inside = [axes(across, up, xlabel, ylabel), *parts, *over]
    rows = [(name, *values) for name, values in zip(names, told, strict=True)]
    keys = [(group.name, f"bar {group.style}") for group in groups]
    return Chart(
        ident,
        title,
        drawing(ident, title, inside, {"kind": "bar", "boxes": boxes, "text": text}),
        (xlabel, *header),
        rows,
        [*keys, *legend],
        note,
    )


@dataclass(frozen=True)
class Point:
    """A dot, and what the pointer says of it."""

    x: float
    y: float
    text: str
    style: str = "c0"
    reach: float = 0.0  # half the length of a vertical bar through it


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
    xformat: Format = plain,
    note: str = "",
) -> Chart:
    """Dots in a plane."""
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
    inside = [axes(across, up, xlabel, ylabel, xformat=xformat), *over, *parts]
    hover = {"kind": "point", "boxes": boxes, "text": [point.text for point in points]}
    return Chart(ident, title, drawing(ident, title, inside, hover), header, rows, legend, note)
