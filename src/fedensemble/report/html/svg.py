"""Building blocks of SVG: elements with escaped text, scales and axes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

WIDTH, HEIGHT = 400.0, 260.0  # of a drawing; the page scales it together with its text
LEFT, RIGHT, TOP, BOTTOM = 70.0, 12.0, 12.0, 44.0
LONGEST = 6  # characters of a tick label for which LEFT has space

Format = Callable[[float], str]


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; `class_` and `text_anchor` become class and text-anchor, None is omitted.

    >>> tag("text", "1 < 2", x=0.5, class_="a")
    Markup('<text x="0.5" class="a">1 &lt; 2</text>')
    """
    pairs = (
        (key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    )
    rendered = Markup("").join(
        Markup(' {}="{}"').format(key, number(value)) for key, value in pairs
    )
    return Markup("<{0}{1}>{2}</{0}>").format(
        name, rendered, Markup("").join(escape(child) for child in children)
    )


def number(value: object) -> object:
    """A float as a short coordinate; any other value unchanged."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def path(points: Iterable[tuple[float, float]]) -> str:
    """The path data of a line through the points, interrupted at points that are not finite."""
    parts, pen = [], "M"
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        parts.append(f"{pen}{number(x)} {number(y)}")
        pen = "L"
    return "".join(parts)


@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def scale(values: Iterable[float], start: float, end: float, margin: float = 0.06) -> Scale:
    """A scale that covers all finite values extended on both sides by `margin` of their range."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    extra = margin * (high - low) or abs(high) * 0.05 or 0.5
    return Scale(low - extra, high + extra, start, end)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values for the ticks between `low` and `high`.

    >>> ticks(0, 100), ticks(0.93, 0.96, 4)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.93, 0.94, 0.95, 0.96])
    """
    span = high - low
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(
        (size * m for m in (1, 2, 2.5, 5, 10) if span / (size * m) <= most - 1 + 1e-9), size * 10
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def format_number(value: float) -> str:
    """A value as short text.

    >>> format_number(12000.0), format_number(0.25), format_number(3.0)
    ('12,000', '0.25', '3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"


def tick(value: float) -> str:
    """The label of a tick, short enough to fit next to an axis.

    >>> tick(0.015), tick(120000.0), tick(0.00025)
    ('0.015', '1.2e5', '2.5e-4')
    """
    text = format_number(value)
    if len(text) <= LONGEST:
        return text
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def axes(x: Scale, y: Scale, xlabel: str, ylabel: str, xformat: Format = format_number) -> Markup:
    """The grid, ticks and axis labels of a drawing."""
    parts = []
    for value in ticks(y.low, y.high):
        at = y(value)
        parts.append(tag("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", tick(value), x=x.start - 6, y=at + 4, text_anchor="end"))
    for value in ticks(x.low, x.high, 12 if 3 < x.high - x.low <= 12 else 6):
        if xformat(value):
            parts.append(
                tag("text", xformat(value), x=x(value), y=y.start + 16, text_anchor="middle")
            )
            parts.append(
                tag("line", x1=x(value), x2=x(value), y1=y.start, y2=y.start + 4, class_="axis")
            )
    parts.append(tag("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    return Markup("").join([*parts, axis_labels(x, y, xlabel, ylabel)])


def axis_labels(x: Scale, y: Scale, xlabel: str, ylabel: str) -> Markup:
    """The labels of both axes."""
    middle = (y.start + y.end) / 2
    return tag(
        "text",
        xlabel,
        x=(x.start + x.end) / 2,
        y=y.start + 36,
        text_anchor="middle",
        class_="label",
    ) + tag(
        "text",
        ylabel,
        x=13.0,
        y=middle,
        text_anchor="middle",
        class_="label",
        transform=f"rotate(-90 13 {number(middle)})",
    )


def drawing(
    ident: str,
    title: str,
    parts: Sequence[object],
    hover: Any,
    size: tuple[float, float] = (WIDTH, HEIGHT),
    wide: bool = False,
) -> Markup:
    """A complete SVG drawing; the page's script reads its tooltips from `hover`."""
    return tag(
        "svg",
        tag("title", title),
        *parts,
        id=f"plot-{ident}",
        class_="chart wide" if wide else "chart",
        viewBox=f"0 0 {number(size[0])} {number(size[1])}",
        role="img",
        aria_label=title,
        tabindex="0",
        data_hover=json.dumps(hover, separators=(",", ":"), allow_nan=False),
    )
