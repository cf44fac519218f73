"""Learning curves of a paper's table: one panel per row, one line per column."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ...errors import DataError
from ...experiment.compare import RowResult
from ...experiment.paper_table import Reproduction
from ...experiment.reproduce import CellResult
from ..downsample import averaged, caption, grouped
from ..tables import PERCENT, TITLES, TextTable
from .paper_grid import PaperReport, headline
from .plots import COLOURS, LINES, STYLE, explain_bands, one_legend

# One line style more than LINES, because the paper compares five methods.
STROKES = (*LINES, (0, (5, 1, 1, 1, 1, 1)))


def curves(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The metric over rounds: mean over seeds, with a band of one standard deviation."""
    known = [result for result in results if result.runs is not None]
    if not known:
        raise DataError(f"None of the runs of {reproduction.name} has been trained yet.")
    metric = reproduction.table.metric
    panels = list(dict.fromkeys(result.cell.row for result in known))
    methods = list(dict.fromkeys(result.cell.column for result in known))
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    rows = -(-len(panels) // columns)
    lines = []
    captions: dict[str, str] = {}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * columns, 3.7 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis, panel in zip(axes, panels, strict=False):
            for result in known:
                if result.cell.row == panel and result.runs is not None:
                    rounds, mean, spread = over_rounds(result.runs, metric)
                    index = methods.index(result.cell.column)
                    colour, line = COLOURS[index % len(COLOURS)], STROKES[index % len(STROKES)]
                    x, middle, width = over_rounds(result.runs, metric, smooth=True)
                    axis.plot(
                        x,
                        middle,
                        color=colour,
                        linestyle=line,
                        linewidth=1.7,
                        label=result.cell.column,
                    )
                    axis.fill_between(
                        x, middle - width, middle + width, color=colour, alpha=0.15, linewidth=0
                    )
                    captions[panel] = caption(len(rounds))
                    several = len(result.runs.curves) > 1
                    lines += [
                        (
                            panel,
                            result.cell.column,
                            str(at),
                            f"{value:.6g}",
                            f"{width:.6g}" if several else "",
                        )
                        for at, value, width in zip(rounds, mean, spread, strict=True)
                    ]
            axis.xaxis.get_major_locator().set_params(integer=True)
            xlabel = f"communication round\n{captions[panel]}".strip()
            axis.set(xlabel=xlabel, ylabel=f"test {TITLES.get(metric, metric)}", title=panel)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        if any(result.runs is not None and len(result.runs.curves) > 1 for result in known):
            explain_bands(axes[0])
        one_legend(figure, axes)
        figure.suptitle(headline(reproduction))
    last = {line[:2]: line[2:] for line in lines}  # later rounds replace earlier ones
    ends = tuple(
        (*names, at, f"{float(mean):.2f}", f"{float(width):.2f}" if width else "–")
        for names, (at, mean, width) in last.items()
    )
    header = ("data", "method", "round", "mean", "standard deviation")
    return PaperReport(
        TextTable(f"{headline(reproduction)}; the last point of each curve", header, ends),
        TextTable("curves", header, tuple(lines)),
        {"curves.png": figure},
    )


def over_rounds(
    runs: RowResult, metric: str, smooth: bool = False
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The rounds with a test, and the mean and standard deviation of the metric over seeds.

    Args:
        smooth: average neighbouring tests if there are many.
    """
    tested = [[record for record in curve if "test" in record] for curve in runs.curves]
    scale = 100 if metric in PERCENT else 1
    by_seed = [[record["test"][metric] for record in curve] for curve in tested]
    values = scale * np.array([averaged(curve) for curve in by_seed] if smooth else by_seed)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    rounds = [record["round"] for record in tested[0]]
    return [group[-1] for group in grouped(rounds)] if smooth else rounds, values.mean(0), spread
