"""Report of the numerical checks of the paper's theorems: a table and five figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ...errors import DataError
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ...theory.rates import fit_power_law
from ..tables.result_table import TextTable
from ..theory.theory_posterior import PosteriorResult, posterior_study
from ..theory.theory_runs import (
    VarianceResult,
    WidthResult,
    WidthStudy,
    broken,
    variance_study,
)
from .paper_grid import PaperReport, headline
from .theory_plots import (
    drift_figure,
    error_figure,
    posterior_figure,
    process_figure,
    variance_figure,
)

HEADER = ("what", "case", "theory", "measured")


class Checks(NamedTuple):
    """All results that the runs allow."""

    widths: list[WidthResult]
    broken: dict[str, WidthResult]
    variances: list[VarianceResult]
    posteriors: list[PosteriorResult]


def theory(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The table and the figures of the checks whose runs are there."""
    known = [result for result in results if result.runs is not None]
    if not known:
        raise DataError(
            f"None of the runs of {reproduction.name} has been trained yet: leave out --only."
        )

    def of(row: str) -> list[CellResult]:
        return [result for result in known if result.cell.row == row]

    study = WidthStudy()
    checks = Checks(
        [study.evaluate(result) for result in of("widths")],
        {result.cell.column: broken(result) for result in of("broken assumptions")},
        [variance_study(result) for result in of("variance")],
        [posterior_study(result) for result in of("posterior")],
    )
    limit = study.limit
    figures: dict[str, Figure] = {}
    if checks.widths or checks.broken:
        figures["error.png"] = error_figure(checks.widths, checks.broken)
    if checks.widths and limit is not None:
        figures["process.png"] = process_figure(checks.widths, limit)
    if checks.variances:
        figures["variance.png"] = variance_figure(checks.variances)
    if len(checks.widths) > 1:
        figures["drift.png"] = drift_figure(checks.widths)
    if checks.posteriors:
        figures["posterior.png"] = posterior_figure(checks.posteriors)
    rows = [
        *_error_rows(checks),
        *_process_rows(checks.widths),
        *_width_rows(checks.widths),
        *_variance_rows(checks.variances),
        *_posterior_rows(checks.posteriors),
    ]
    table = TextTable(headline(reproduction), HEADER, tuple(rows))
    return PaperReport(table, table, figures)


Row = tuple[str, str, str, str]


def _error_rows(checks: Checks) -> list[Row]:
    """Training errors against the bound of Theorem 1, in the last round."""
    cases = {f"width {found.width}": found for found in checks.widths} | checks.broken
    rows = []
    for name, found in cases.items():
        above = sum(
            bool((error > bound).any())
            for error, bound in zip(found.error, found.bound, strict=True)
        )
        bound = np.mean([values[-1] for values in found.bound])
        error = np.mean([values[-1] for values in found.error])
        measured = f"{error:.2g}; above the bound in {above} of {len(found.error)} runs"
        rows.append(("Theorem 1: training error", name, f"at most {bound:.2g}", measured))
    return rows


def _process_rows(widths: Sequence[WidthResult]) -> list[Row]:
    """Mean and standard deviation of the modes' standardised scores: 0 and 1 in the limit."""
    rows = []
    for found in widths:
        limit, own = np.concatenate(found.limit_scores), np.concatenate(found.scores)
        rows.append(
            (
                "Theorem 2: mean, s.d. of scores",
                f"width {found.width}",
                f"0 ± {len(limit) ** -0.5:.2f}, 1",
                f"{limit.mean():.2f}, {limit.std():.2f}; in the process after as many rounds "
                f"{own.mean():.2f}, {own.std():.2f}",
            )
        )
    return rows


def _width_rows(widths: Sequence[WidthResult]) -> list[Row]:
    """Exponents in the width."""
    if len(widths) < 2:
        return []
    x = [found.width for found in widths]
    quantities: dict[str, tuple[Callable[[WidthResult], float], str]] = {
        "distance of modes to the linear model": (lambda f: float(np.mean(f.distance)), "-0.5"),
        "distance of the kernel to its limit": (lambda f: float(np.mean(f.to_limit)), "-0.5"),
        "drift of the kernel from its start": (lambda f: float(np.mean(f.drift)), "at most -0.5"),
    }
    rows = []
    for name, (value, expected) in quantities.items():
        law = fit_power_law(x, [value(found) for found in widths])
        error = "" if np.isnan(law.error) else f" ± {law.error:.2f}"
        rows.append((name, "exponent in the width", expected, f"{law.exponent:.2f}{error}"))
    return rows


def _variance_rows(variances: Sequence[VarianceResult]) -> list[Row]:
    """Exponent in K and the correlation of modes."""
    rows = []
    for found in variances:
        rows.append(
            (
                "Corollary: variance of the average",
                f"{found.label}: exponent in K",
                "-1 if modes are independent",
                f"{found.exponent:.2f} ± {found.error:.2f}; correlation of two modes "
                f"{found.correlation:.2f}",
            )
        )
    return rows


def _posterior_rows(posteriors: Sequence[PosteriorResult]) -> list[Row]:
    """Mean and spread of the modes, compared with the exact process."""
    rows = []
    for found in posteriors:
        exact = found.exact
        deviation = exact.standard_deviation.numpy()
        shift = np.sqrt(np.mean((found.functions.mean(0) - exact.mean.numpy()) ** 2))
        spread = found.functions.std(0, ddof=1)
        expected = f"difference 0 ± {np.sqrt(np.mean(deviation**2) / len(found.functions)):.2f}"
        rows.append(("posterior: mean", found.label, expected, f"{shift:.2f}"))
        rows.append(
            (
                "posterior: standard deviation",
                found.label,
                f"{np.sqrt(np.mean(deviation**2)):.2f}",
                f"{np.sqrt(np.mean(spread**2)):.2f}",
            )
        )
        low, high = found.log_posterior.min(), found.log_posterior.max()
        rows.append(
            ("posterior: log p(w | D) + log p(D)", found.label, "", f"{low:.1f} to {high:.1f}")
        )
    return rows
