"""Learning curves of a paper's table: one panel per row, one line per column."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ...errors import DataError
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ..downsample import caption, grouped
from ..palette import LIGHT as COLORS
from ..seed_curves import curve_over_seeds, rounds_with_tests
from ..tables.result_table import TITLES, TextTable
from .paper_grid import PaperReport, headline
from .plots import LINES, STYLE, explain_bands, one_legend

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
                    runs = result.runs.curves
                    rounds = rounds_with_tests(runs)
                    groups = grouped(rounds)
                    mean, spread = curve_over_seeds(runs, metric, [[at] for at in rounds])
                    index = methods.index(result.cell.column)
                    color, line = COLORS[index % len(COLORS)], STROKES[index % len(STROKES)]
                    x = [group[-1] for group in groups]
                    middle, width = map(np.array, curve_over_seeds(runs, metric, groups))
                    axis.plot(
                        x,
                        middle,
                        color=color,
                        linestyle=line,
                        linewidth=1.7,
                        label=result.cell.column,
                    )
                    axis.fill_between(
                        x, middle - width, middle + width, color=color, alpha=0.15, linewidth=0
                    )
                    captions[panel] = caption(len(rounds))
                    several = len(runs) > 1
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
