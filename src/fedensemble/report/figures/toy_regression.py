"""Reports of the toy regression: table and figure of bias and variance, and the fit."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ...config.build import build_data
from ...errors import DataError
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ...theory.bias_variance import BiasVariance, decompose, limit_variance
from ..palette import LIGHT as COLORS
from ..tables.result_table import NO_INTERVAL, NONE, TextTable
from ..theory.toy_runs import features, finite_variance, predictions
from .paper_grid import PAPER, PaperReport, headline, paper_number, shows_paper
from .plots import STYLE, escape_label

BAND = (5, 95)  # percentiles of the modes between which the band lies


def bias_variance(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """Table 1: bias and variance by K, the 1/K line and the variance of the Gaussian process."""
    known = [result for result in results if result.runs is not None]
    if not known:
        raise DataError(
            f"None of the runs of {reproduction.name} has been trained yet: leave out --only."
        )
    config = known[0].cell.configs[0]
    data = build_data(config)
    assert data.y_test is not None
    truth = data.y_test.double().flatten().numpy()
    assert data.x_test is not None
    splits = {
        result.cell.column: decompose(predictions(result, data.x_test), truth) for result in known
    }
    scale = float(config.model["scale"])
    limit = limit_variance(
        features(config, data, data.x_test), features(config, data, data.x), scale
    )
    finite = {
        n: finite_variance(config, data, scale, split.modes) / split.modes
        for n, split in splits.items()
    }
    table = _table(reproduction, splits, limit, finite)
    rows = tuple(
        (
            name,
            str(s.modes),
            str(s.runs),
            f"{s.bias:.6g}",
            f"{s.variance:.6g}",
            f"{limit / s.modes:.6g}",
            f"{finite[name]:.6g}",
        )
        for name, s in splits.items()
    )
    header = ("column", "modes", "runs", "bias", "variance", "gp limit", "gp after as many rounds")
    figure = _bias_variance_figure(reproduction, list(splits.values()), limit, finite)
    return PaperReport(table, TextTable("numbers", header, rows), {"bias-variance.png": figure})


def _table(
    reproduction: Reproduction,
    splits: dict[str, BiasVariance],
    limit: float,
    finite: dict[str, float],
) -> TextTable:
    names, paper = list(splits), reproduction.table.paper
    first = next(iter(splits.values()))
    lines = [
        ("bias", "ours", *(f"{split.bias:.3f}" for split in splits.values())),
        ("bias", PAPER, *(paper["bias"].get(name, NONE) for name in names)),
        ("variance", "ours", *(f"{split.variance:.4f}" for split in splits.values())),
        ("variance", PAPER, *(paper["variance"].get(name, NONE) for name in names)),
        (
            "variance",
            "1/K of the first",
            *(f"{first.modes * first.variance / s.modes:.4f}" for s in splits.values()),
        ),
        (
            "variance",
            "Gaussian process, as many rounds",
            *(f"{finite[name]:.4f}" for name in names),
        ),
        (
            "variance",
            "Gaussian process, limit",
            *(f"{limit / split.modes:.2g}" for split in splits.values()),
        ),
    ]
    runs = {split.runs for split in splits.values()}
    title = f"{headline(reproduction)}, {', '.join(map(str, sorted(runs)))} runs each"
    return TextTable(title, ("", "", *names), tuple(lines))


def _bias_variance_figure(
    reproduction: Reproduction,
    splits: Sequence[BiasVariance],
    limit: float,
    finite: dict[str, float],
) -> Figure:
    modes = np.array([split.modes for split in splits])
    paper = {
        what: [
            (split.modes, number)
            for split, name in zip(splits, finite, strict=True)
            if (number := paper_number(reproduction.table.paper[what].get(name, ""))) is not None
            and shows_paper(reproduction)
        ]
        for what in ("bias", "variance")
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(modes, [s.bias for s in splits], color=COLORS[0], marker="o", label="ours")
        left.set(xscale="log", xlabel="modes K", ylabel="root of the squared bias", title="Bias")
        left.set_ylim(0, 1.3 * max(s.bias for s in splits))
        right.plot(modes, [s.variance for s in splits], color=COLORS[0], marker="o", label="ours")
        for axis, points in ((left, paper["bias"]), (right, paper["variance"])):
            if points:
                axis.plot(
                    [m for m, _ in points],
                    [n[0] for _, n in points],
                    color="black",
                    marker="D",
                    markerfacecolor="white",
                    linestyle=":",
                    label="paper",
                )
        right.set_yscale("log")
        line = splits[0].modes * splits[0].variance / modes
        right.plot(modes, line, color=COLORS[6], linestyle="--", label="1/K of our first")
        right.plot(
            modes,
            list(finite.values()),
            color=COLORS[2],
            linestyle="-.",
            marker="^",
            label="Gaussian process after as many rounds",
        )
        values = [
            *(s.variance for s in splits),
            *line,
            *finite.values(),
            *(n[0] for _, n in paper["variance"]),
        ]
        right.set_ylim(min(values) / 3, max(values) * 2)
        # The limit usually lies far below the other lines. The range of the axis was set without
        # it, so that the others keep their space; the legend gives its value.
        right.plot(
            modes,
            limit / modes,
            color=COLORS[5],
            linestyle=(0, (1, 2)),
            linewidth=2,
            label=f"its limit (Theorem 2): {limit:.1g} / K, below",
        )
        right.set(xscale="log", xlabel="modes K", ylabel="variance", title="Variance")
        for axis in (left, right):
            axis.set_xticks(modes, [str(m) for m in modes])
            axis.minorticks_off()
        left.legend(loc="lower left")
        right.legend(loc="best", fontsize="small")
        return figure


def toy_fit(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The fit of each column's first run: data, truth, average and the band of modes."""
    known = [result for result in results if result.runs is not None]
    if not known:
        raise DataError(
            f"None of the runs of {reproduction.name} has been trained yet: leave out --only."
        )
    rows = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4 * len(known), 4.2), layout="constrained")
        panels = figure.subplots(1, len(known), squeeze=False, sharey=True)[0]
        for axis, result in zip(panels, known, strict=True):
            data = build_data(result.cell.configs[0])
            assert data.x_test is not None and data.y_test is not None  # noqa: PT018
            x, truth = data.x_test.flatten().numpy(), data.y_test.double().flatten().numpy()
            members = predictions(result, data.x_test)[0]
            mean = members.mean(0)
            low, high = np.percentile(members, BAND, axis=0)
            if len(members) > 1:
                axis.fill_between(
                    x, low, high, color=COLORS[2], alpha=0.25, linewidth=0, label="9 of 10 modes"
                )
            axis.plot(
                x, truth, color="black", linestyle="--", linewidth=1.2, label="E(y | x) = sin 2πx"
            )
            axis.plot(
                x,
                mean,
                color=COLORS[1],
                linewidth=1.8,
                label="average" if len(members) > 1 else "the model",
            )
            axis.plot(
                data.x.flatten(),
                data.y.flatten(),
                ".",
                color=COLORS[0],
                markersize=4,
                label="clients' points",
            )
            error = float(np.sqrt(((mean - truth) ** 2).mean()))
            axis.set(
                title=f"{escape_label(result.cell.column)}: error {error:.3f}",
                xlabel="x",
                ylabel="y",
                ylim=(-2.6, 2.9),
            )
            axis.legend(loc="upper right", fontsize="small", ncols=2)
            rows.append((result.cell.column, f"{error:.3f}", f"{float((high - low).mean()):.3f}"))
        figure.supxlabel(NO_INTERVAL, fontsize="small")
    table = TextTable(
        headline(reproduction),
        ("", "root mean squared error", "mean width of the band"),
        tuple(rows),
    )
    return PaperReport(table, table, {"toy.png": figure})
