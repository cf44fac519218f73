"""Tables of the metrics of each client's own test rows: of a run, and of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...client_metrics import CLASSIFICATION, INTERVALS, REGRESSION, SETS, STATISTICS
from ...experiment.studies.compare import RowResult, mean_and_std
from .result_table import CALIBRATED, NONE, TITLES, TextTable, show

CLIENTS_FILE = "clients.csv"  # in the folder of a comparison
CLIENTS_TITLE = "Clients"
ON_CLIENTS = (
    "Each client on its own test rows; all clients count alike. A tenth of the clients are worse "
    "than the 10th percentile."
)
STATISTIC_TITLES = {
    "mean": "mean",
    "std": "standard deviation",
    "p10": "10th percentile",
    "worst_10": "worst tenth, mean",
    "worst": "worst client",
}
KINDS = {"test_clients": "", "test_new_clients": "new clients"}


def clients_table(summary: Mapping[str, Any]) -> TextTable | None:
    """One row per metric, and per metric of new clients; None without metrics of clients."""
    rows = []
    groups = [(kind, summary.get(key, {})) for key, kind in KINDS.items()]
    groups.append((CALIBRATED, (summary.get("calibration") or {}).get("test_clients", {})))
    for kind, found in groups:
        for metric in (*CLASSIFICATION, *REGRESSION, *SETS, *INTERVALS):
            if f"{metric}_mean" in found:
                name = TITLES[metric] + (f", {kind}" if kind else "")
                cells = [_cell(found, metric, statistic) for statistic in STATISTICS]
                rows.append((name, *cells, str(int(found["clients"]))))
    if not rows:
        return None
    header = ("metric", *(STATISTIC_TITLES[name] for name in STATISTICS), "clients")
    return TextTable(CLIENTS_TITLE, header, tuple(rows))


def fleet_personal_table(summary: Mapping[str, Any]) -> TextTable | None:
    """Personal models that clients of a fleet keep: a row per method; None if there are none.

    The rows that they are tested with are those that they were chosen by.
    """
    made = summary.get("personalize")
    if not made or not made.get("validation"):
        return None
    metrics = tuple(next(iter(made["validation"].values())))
    rows = tuple(
        (method, *(show(name, found[name]) for name in metrics))
        for method, found in made["validation"].items()
    )
    title = f"Personal models of {made['clients']:,} clients, on the rows that chose them"
    return TextTable(title, ("method", *(TITLES[name] for name in metrics)), rows)


def _cell(found: Mapping[str, float], metric: str, statistic: str) -> str:
    """A statistic as text; a dash if single clients are not published."""
    name = f"{metric}_{statistic}"
    return show(metric, found[name]) if name in found else NONE


def compare_clients(results: Sequence[RowResult], metric: str) -> TextTable | None:
    """One row per method: how a metric is distributed over clients; None without such metrics.

    Args:
        metric: the main metric of the comparison; NLL and ECE are shown for accuracy, too.
    """
    main = metric if metric in CLASSIFICATION or metric in REGRESSION else "accuracy"
    shown = [("test_clients", main, statistic) for statistic in STATISTICS]
    shown += [("test_clients", m, "worst_10") for m in CLASSIFICATION if m != main]
    shown += [("test_new_clients", main, statistic) for statistic in ("mean", "worst_10")]
    columns = [
        (kind, name, statistic)
        for kind, name, statistic in shown
        if any(result.values(f"{name}_{statistic}", kind) for result in results)
    ]
    if not columns:
        return None
    header = [
        ", ".join(filter(None, [TITLES[name], KINDS[kind], STATISTIC_TITLES[statistic]]))
        for kind, name, statistic in columns
    ]
    rows = [
        (
            result.label,
            *(_over_seeds(result, kind, name, statistic) for kind, name, statistic in columns),
        )
        for result in results
    ]
    return TextTable(CLIENTS_TITLE, ("method", *header), tuple(rows))


def _over_seeds(result: RowResult, kind: str, metric: str, statistic: str) -> str:
    """A statistic as mean ± standard deviation over seeds; a dash if there is none."""
    values = result.values(f"{metric}_{statistic}", kind)
    if not values or len(values) < len(result.summaries):
        return NONE
    return show(metric, *mean_and_std(values)) if len(values) > 1 else show(metric, values[0])
