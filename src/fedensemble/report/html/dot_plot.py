"""A dot plot: one line per name, with its values as dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .charts import Chart
from .svg import BOTTOM, RIGHT, TOP, WIDTH, drawing, number, scale, tag, tick, ticks

# A line is LINE_HEIGHT high, enough for its name above its dots; longer names are cut.
LEFT, LINE_HEIGHT = 14.0, 40.0
RADIUS, LONGEST_NAME = 3.5, 46


@dataclass(frozen=True)
class DotRow:
    """A name, its values with their tooltips, their mean, and a value to compare with, if any."""

    name: str
    points: Sequence[tuple[float, str]]
    mean: float
    style: str
    cross: float | None = None


def dot_chart(
    ident: str,
    title: str,
    lines: Sequence[DotRow],
    *,
    xlabel: str,
    header: tuple[str, ...],
    rows: Sequence[Sequence[str]],
    legend: Sequence[tuple[str, str]],
) -> Chart:
    """One line of dots per name; the drawing grows with the number of names."""
    values = [value for line in lines for value, _ in line.points]
    x_scale = scale(
        [*values, *(line.cross for line in lines if line.cross is not None)],
        LEFT,
        WIDTH - RIGHT,
        margin=0.08,
    )
    bottom = TOP + LINE_HEIGHT * len(lines)
    parts: list[Markup] = []
    for value in ticks(x_scale.low, x_scale.high):
        x = x_scale(value)
        parts.append(tag("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="grid"))
        parts.append(tag("text", tick(value), x=x, y=bottom + 16, text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    parts.append(
        tag(
            "text",
            xlabel,
            x=(LEFT + WIDTH - RIGHT) / 2,
            y=bottom + 36,
            text_anchor="middle",
            class_="label",
        )
    )
    boxes, text = [], []
    for at, line in enumerate(lines):
        y = TOP + LINE_HEIGHT * (at + 1) - 11
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y + 11, y2=y + 11, class_="grid"))
        name = line.name if len(line.name) <= LONGEST_NAME else f"{line.name[: LONGEST_NAME - 1]}…"
        parts.append(tag("text", name, x=LEFT, y=y - 13, class_="label"))
        x = x_scale(line.mean)
        parts.append(tag("line", x1=x, x2=x, y1=y - 7, y2=y + 7, class_=f"line {line.style}"))
        for value, tooltip in line.points:
            parts.append(
                tag("circle", cx=x_scale(value), cy=y, r=RADIUS, class_=f"dot {line.style}")
            )
            boxes.append([round(x_scale(value) - 5, 1), round(y - 5, 1), 10, 10])
            text.append(tooltip)
        if line.cross is not None:
            parts.append(
                tag(
                    "path",
                    d=f"M{number(x_scale(line.cross) - 5)} {number(y - 5)}l10 10m0 -10l-10 10",
                    class_="cross",
                )
            )
    hover = {"kind": "point", "boxes": boxes, "text": text}
    svg = drawing(ident, title, parts, hover, (WIDTH, bottom + BOTTOM))
    return Chart(ident, title, svg, header, rows, legend)
