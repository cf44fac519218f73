"""Heat maps of counts: the classes that each client holds, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from .charts import Chart
from .svg import Scale, axis_labels, drawing, number, tag

# Cells of the same shade are one SVG path, which keeps the file of a large grid small.
LEVELS = 10  # of shade
FEW = 12  # up to this number of columns, cells show their counts
CHARACTER = 7.0  # width of a character of a label, in pixels
TITLE = 22.0  # width of the rotated title of the rows
LONGEST = 16  # characters of a row's label
LEAST_WIDTH = 36.0  # for the name of a column; where columns are narrower, not all have a label
LEFT, TOP, BOTTOM, RIGHT = 70.0, 8.0, 44.0, 8.0


def grid_chart(
    ident: str,
    title: str,
    counts: Sequence[Sequence[int]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row: str,
    column: str,
    share: str,
    style: str = "c0",
    diagonal: str | None = None,
    wide: bool = False,
    header: tuple[str, ...] = (),
    table: Sequence[Sequence[str]] = (),
    legend: Sequence[tuple[str, str]] = (),
    note: str = "",
) -> Chart:
    """A heat map with one cell per count.

    Args:
        share: "row" or "column". The shade of a cell is its share of that sum, relative to the
            largest share, so that small rows and columns are as visible as large ones.
        diagonal: another style for cells whose row is their column.
    """
    shade = _shades(counts, share)
    width = 900.0 if wide else 440.0
    # The tooltips and the table have the full names.
    short_rows = [_abbreviate(name, LONGEST) for name in rows]
    left = max(LEFT, TITLE + CHARACTER * max(len(name) for name in short_rows))
    side_x = (width - left - RIGHT) / len(columns)
    side_y = min(max(1.2 * side_x, 220.0 / len(rows)), 22.0) if wide else side_x
    height = side_y * len(rows)
    paths: dict[str, list[str]] = {}
    texts: list[Markup] = []
    gap = 0.5 if side_x > 4 else 0.0
    for r, line in enumerate(counts):
        for c, count in enumerate(line):
            if not count:
                continue
            level = max(1, round(LEVELS * min(1.0, shade[r][c])))
            kind = f"cell {diagonal if diagonal and r == c else style} l{level}"
            x, y = left + c * side_x, TOP + r * side_y
            w, h = number(side_x - gap), number(side_y - gap)
            paths.setdefault(kind, []).append(f"M{number(x)} {number(y)}h{w}v{h}h-{w}z")
            if len(columns) <= FEW and not wide:
                texts.append(
                    tag(
                        "text",
                        f"{count}",
                        x=x + side_x / 2,
                        y=y + side_y / 2 + 4,
                        text_anchor="middle",
                        class_="count strong" if level > 5 else "count",
                    )
                )
    frame = tag("rect", x=left, y=TOP, width=width - left - RIGHT, height=height, class_="frame")
    fitting = int(max(side_x, LEAST_WIDTH) / CHARACTER)
    short_columns = [_abbreviate(name, fitting) for name in columns]
    down = [
        tag("text", short_rows[r], x=left - 5, y=TOP + (r + 0.5) * side_y + 4, text_anchor="end")
        for r in _label_indices(len(rows), side_y, 13)
    ]
    along = [
        tag(
            "text",
            short_columns[c],
            x=left + (c + 0.5) * side_x,
            y=TOP + height + 15,
            text_anchor="middle",
        )
        for c in _label_indices(
            len(columns), side_x, 11 + 5 * max(len(name) for name in short_columns)
        )
    ]
    labels = axis_labels(
        Scale(0, 1, left, width - RIGHT), Scale(0, 1, TOP + height, TOP), column, row
    )
    cells = [tag("path", d="".join(parts), class_=kind) for kind, parts in sorted(paths.items())]
    hover = {
        "kind": "grid",
        "x": left,
        "y": TOP,
        "w": round(side_x, 3),
        "h": round(side_y, 3),
        "row": row,
        "column": column,
        "rows": list(rows),
        "columns": list(columns),
        "share": share,
        "counts": [list(map(int, line)) for line in counts],
    }
    svg = drawing(
        ident,
        title,
        [frame, *cells, *texts, *down, *along, labels],
        hover,
        (width, TOP + height + BOTTOM),
        wide,
    )
    return Chart(ident, title, svg, header, table, legend, note, wide)


def _abbreviate(name: str, most: int) -> str:
    """The name, cut to `most` characters.

    >>> _abbreviate("automobile", 5), _abbreviate("cat", 5)
    ('auto…', 'cat')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _shades(counts: Sequence[Sequence[int]], share: str) -> list[list[float]]:
    """The share of each count in its row or column, divided by the largest share of all."""
    columns = [sum(column) or 1 for column in zip(*counts, strict=True)]
    shares = [
        [
            count / ((sum(line) or 1) if share == "row" else columns[at])
            for at, count in enumerate(line)
        ]
        for line in counts
    ]
    most = max((max(line, default=0.0) for line in shares), default=0.0) or 1.0
    return [[value / most for value in line] for line in shares]


def _label_indices(count: int, side: float, needed: float) -> range:
    """The indices of the lines that get a label, so that labels do not overlap."""
    stride = next(
        step
        for step in (1, 2, 5, 10, 20, 50, 100, 1000, count)
        if step * side >= needed or step >= count
    )
    return range(0, count, stride)
