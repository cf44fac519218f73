"""Values by name: a line for each name, dots along it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .charts import Chart
from .svg import BOTTOM, RIGHT, TOP, WIDTH, drawing, number, scale, tag, tick, ticks

LEFT, EACH = 14.0, 40.0  # the height of a line holds its name above its dots
RADIUS, LONG = 3.5, 46  # letters of a name


@dataclass(frozen=True)
class DotRow:
    """A name, its values and what the pointer says of each, their mean, and perhaps another number
    to compare with.
    """

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
    """Dots by name, values along; higher with every name."""
    found = [value for line in lines for value, _ in line.points]
    across = scale(
        [*found, *(line.cross for line in lines if line.cross is not None)],
        LEFT,
        WIDTH - RIGHT,
        room=0.08,
    )
    bottom = TOP + EACH * len(lines)
    parts: list[Markup] = []
    for value in ticks(across.low, across.high):
        x = across(value)
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
        y = TOP + EACH * (at + 1) - 11
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y + 11, y2=y + 11, class_="grid"))
        name = line.name if len(line.name) <= LONG else f"{line.name[: LONG - 1]}…"
        parts.append(tag("text", name, x=LEFT, y=y - 13, class_="label"))
        x = across(line.mean)
        parts.append(tag("line", x1=x, x2=x, y1=y - 7, y2=y + 7, class_=f"line {line.style}"))
        for value, said in line.points:
            parts.append(
                tag("circle", cx=across(value), cy=y, r=RADIUS, class_=f"dot {line.style}")
            )
            boxes.append([round(across(value) - 5, 1), round(y - 5, 1), 10, 10])
            text.append(said)
        if line.cross is not None:
            parts.append(
                tag(
                    "path",
                    d=f"M{number(across(line.cross) - 5)} {number(y - 5)}l10 10m0 -10l-10 10",
                    class_="cross",
                )
            )
    hover = {"kind": "point", "boxes": boxes, "text": text}
    svg = drawing(ident, title, parts, hover, (WIDTH, bottom + BOTTOM))
    return Chart(ident, title, svg, header, rows, legend)
