"""The figures of the numerical checks of the paper's theorems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.special import ndtri

from ...theory.bias_variance import FloatArray
from ...theory.gaussian_process import GaussianProcess
from ...theory.rates import fit_power_law
from ..palette import LIGHT as COLORS
from ..tables.result_table import NO_INTERVAL
from ..theory.theory_posterior import PosteriorResult
from ..theory.theory_runs import Limit, VarianceResult, WidthResult, circle_grid
from .plots import STYLE

TWO = 2  # standard deviations of the bands
TICKS = (-1, -0.5, 0, 0.5, 1)  # of x, and of angles over pi


def error_figure(widths: Sequence[WidthResult], broken: Mapping[str, WidthResult]) -> Figure:
    """Theorem 1: training error over rounds, its bound, and runs with a broken assumption."""
    with mpl.rc_context(STYLE):
        panels = 1 + len(broken)
        figure = Figure(figsize=(4.4 * panels, 3.9), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
        shown = [widths[0], widths[len(widths) // 2], widths[-1]] if len(widths) > 2 else widths
        for index, found in enumerate(shown):
            _draw_error(axes[0], found, COLORS[index], f"width {found.width}")
        if widths:
            bound = np.mean(widths[-1].bound, axis=0)
            axes[0].plot(widths[-1].rounds, bound, "k--", label="bound of Theorem 1")
        axes[0].set_title("The assumptions hold")
        for axis, (name, found) in zip(axes[1:], broken.items(), strict=True):
            _draw_error(axis, found, COLORS[1], "mean of the modes")
            axis.plot(found.rounds, np.mean(found.bound, axis=0), "k--", label="bound of Theorem 1")
            axis.set_title(f"Broken: {name}")
        for axis in axes:
            axis.set(yscale="log", xlabel="round")
            axis.legend(loc="lower left", fontsize="small")
        axes[0].set_ylabel("mean squared training error")
        return figure


def _draw_error(axis: Any, found: WidthResult, colour: str, label: str) -> None:
    """The mean over runs and modes, and the range of the runs."""
    errors = np.stack(found.error)
    axis.plot(found.rounds, errors.mean(0), color=colour, label=label)
    axis.fill_between(
        found.rounds, errors.min(0), errors.max(0), color=colour, alpha=0.2, linewidth=0
    )


def process_figure(widths: Sequence[WidthResult], limit: Limit) -> Figure:
    """Theorem 2: modes of the narrowest and the widest network in the process, and QQ plots."""
    process, angle = limit.process(), circle_grid()[0] / np.pi
    shown = [widths[0], widths[-1]] if len(widths) > 1 else widths
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * (len(shown) + 1), 4.2), layout="constrained")
        axes = figure.subplots(1, len(shown) + 1)
        for axis, found in zip(axes, shown, strict=False):
            _draw_band(axis, angle, process, "Theorem 2: mean ± 2 s.d.")
            modes = np.concatenate(found.functions)
            axis.plot(angle, modes[:12].T, color=COLORS[0], linewidth=0.7, alpha=0.6)
            label = f"{min(12, len(modes))} of {len(modes)} modes"
            axis.plot([], [], color=COLORS[0], linewidth=0.7, label=label)
            axis.plot(angle, modes.mean(0), color=COLORS[1], label="mean of all modes")
            axis.set(title=f"Width {found.width}", xlabel="angle / π", ylim=(-2.4, 2.9))
            axis.set_xticks(TICKS)
            axis.legend(loc="upper left", fontsize="small")
        axes[0].set_ylabel("f(x)")
        last = axes[-1]
        for index, found in enumerate(widths):
            scores = np.sort(np.concatenate(found.scores))
            normal = ndtri((np.arange(len(scores)) + 0.5) / len(scores))
            colour = mpl.colormaps["viridis"](0.9 * index / max(1, len(widths) - 1))
            last.plot(normal, scores, color=colour, linewidth=1.2, label=f"{found.width}")
        last.plot([-3, 3], [-3, 3], "k--", linewidth=1, label="normal")
        last.set(
            title="Scores of all modes",
            xlabel="quantiles of N(0, 1)",
            ylabel="standardised scores",
            xlim=(-3, 3),
            ylim=(-4, 4),
        )
        last.legend(loc="upper left", fontsize="small", title="width", title_fontsize="small")
        return figure


def _draw_band(axis: Any, x: FloatArray, process: GaussianProcess, label: str) -> None:
    mean, deviation = process.mean.numpy(), process.standard_deviation.numpy()
    axis.fill_between(
        x,
        mean - TWO * deviation,
        mean + TWO * deviation,
        color=COLORS[2],
        alpha=0.25,
        linewidth=0,
        label=label,
    )
    axis.plot(x, mean, color=COLORS[2], linewidth=1)


def variance_figure(variances: Sequence[VarianceResult]) -> Figure:
    """The corollary: variance over runs by K, and the lines of independent and correlated modes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axis = figure.subplots()
        for index, found in enumerate(variances):
            colour, sizes = COLORS[index], np.array(found.sizes)
            axis.plot(
                sizes,
                found.variances,
                "o",
                color=colour,
                label=f"{found.label}: correlation {found.correlation:.2f}",
            )
            first = found.variances[0]
            rho = found.correlation
            axis.plot(sizes, first * (rho + (1 - rho) / sizes), color=colour, linewidth=1)
            axis.plot(sizes, first / sizes, color=colour, linestyle="--", linewidth=1)
        axis.plot([], [], "k--", linewidth=1, label="1/K: independent modes")
        axis.plot([], [], "k-", linewidth=1, label="ρ + (1 − ρ)/K: correlated modes")
        axis.set(xscale="log", yscale="log", xlabel="modes K", ylabel="variance over runs")
        axis.set_title("Variance of the average of K modes")
        ticks = variances[0].sizes
        axis.set_xticks(ticks, [str(size) for size in ticks])
        axis.minorticks_off()
        axis.legend(loc="lower left", fontsize="small")
        return figure


def drift_figure(widths: Sequence[WidthResult]) -> Figure:
    """Kernel and functions by width, with fitted power laws."""
    x = [found.width for found in widths]
    lines = {
        "kernel after training, from its limit": [np.mean(found.to_limit) for found in widths],
        "modes, from the linear model": [np.mean(found.distance) for found in widths],
        "kernel after training, from its start": [np.mean(found.drift) for found in widths],
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 4.6), layout="constrained")
        axis = figure.subplots()
        for index, (label, values) in enumerate(lines.items()):
            law = fit_power_law(x, [float(value) for value in values])
            colour = COLORS[index]
            axis.plot(x, values, "o", color=colour, label=f"{label}: exponent {law.exponent:.2f}")
            axis.plot(x, law.at(x), color=colour, linewidth=1)
        first = float(next(iter(lines.values()))[0])
        axis.plot(
            x,
            1.5 * first * np.sqrt(x[0] / np.array(x)),
            "k--",
            linewidth=1,
            label="exponent -0.5, the paper's rate",
        )
        axis.set(xscale="log", yscale="log", xlabel="width", ylabel="distance")
        axis.set_title("Distance to the infinitely wide network")
        axis.set_xticks(x, [str(width) for width in x])
        axis.minorticks_off()
        axis.legend(loc="lower left", fontsize="small")
        low = min(min(values) for values in lines.values())
        axis.set_ylim(bottom=float(low) / 5)
        return figure


def posterior_figure(posteriors: Sequence[PosteriorResult]) -> Figure:
    """Regularised modes next to the exact posterior of a small regression."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(posteriors), 4.2), layout="constrained")
        axes = figure.subplots(1, len(posteriors), squeeze=False)[0]
        for axis, found in zip(axes, posteriors, strict=True):
            network = found.other is not None
            x = found.place / np.pi if network else found.place
            at = found.data[0] / np.pi if network else found.data[0]
            exact = "closed form ± 2 s.d." if network else "exact posterior ± 2 s.d."
            _draw_band(axis, x, found.exact, exact)
            axis.plot(x, found.functions[:15].T, color=COLORS[0], linewidth=0.6, alpha=0.5)
            axis.plot(
                [], [], color=COLORS[0], linewidth=0.6, label=f"15 of {len(found.functions)} modes"
            )
            mean, spread = found.functions.mean(0), found.functions.std(0, ddof=1)
            axis.plot(x, mean, color=COLORS[1], label="modes: mean ± 2 s.d.")
            for sign in (-TWO, TWO):
                axis.plot(x, mean + sign * spread, color=COLORS[1], linewidth=1, linestyle=":")
            if found.other is not None:
                middle, deviation = found.other.mean, found.other.standard_deviation
                for number, sign in enumerate((-TWO, TWO)):
                    axis.plot(
                        x,
                        (middle + sign * deviation).numpy(),
                        color=COLORS[5],
                        linewidth=1,
                        linestyle="--",
                        label=None if number else "Laplace at one mode ± 2 s.d.",
                    )
            axis.plot(at, found.data[1], ".", color="black", markersize=6, label="clients' points")
            axis.set(title=found.label.capitalize(), xlabel="angle / π" if network else "x")
            axis.set_xticks(TICKS)
            low, high = axis.get_ylim()
            axis.set_ylim(low, high + 0.45 * (high - low))
            axis.legend(loc="upper left", fontsize="small")
        axes[0].set_ylabel("f(x)")
        figure.supxlabel(NO_INTERVAL, fontsize="small")
        return figure
