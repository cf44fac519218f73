"""Implements `fedensemble personalize`: makes models of single clients from a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...client_metrics import CLASSIFICATION, REGRESSION
from ...errors import InputError
from ...experiment.personal_tests import summarize
from ...federation.federation import Federation
from ...personal.personalize import personalize
from ...personal.result import Personalization, file_name, read_personalization
from ...predict import Ensemble
from ...prediction import Prediction
from ...report.tables.client_tables import STATISTIC_TITLES
from ...report.tables.result_table import NONE, TITLES, TextTable, show

_SHOWN = ("mean", "p10", "worst_10", "worst")


def personalize_run(
    run: Path, methods: str, device: str | None, settings: Mapping[str, Any]
) -> tuple[TextTable, list[str]]:
    """Makes and saves the personal models of a run; returns a table and lines on what was written.

    Args:
        run: folder of a finished run.
        methods: names, separated by commas.
        device: that the models are trained on; None for that of the run.
        settings: of `personalize`; None for the default of a setting.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise InputError("--method is empty: give select, mix, posterior, tune or head.")
    given = {name: value for name, value in settings.items() if value is not None}
    head = given.pop("head", None)
    changes: dict[str, Any] = {} if device is None else {"device": device}
    federation = Federation.load(run, **changes)
    rows, lines = [], []
    regression = federation.model.task == "regression"
    metrics = REGRESSION if regression else CLASSIFICATION
    has_tests = federation.data.test_owner is not None
    for new in (False, True) if federation.data.new_clients is not None else (False,):
        if has_tests:
            found = federation.evaluate_clients(new=new).summary()
            rows.append(("all modes", _group(new), *_cells(found, metrics), NONE, NONE))
    for name in names:
        options = {**given, "head": head} if name == "head" else given
        made = personalize(federation, name, **options)
        for group, new in ((made, False), (made.new, True)):
            if group is not None:
                rows.append(_row(group, new, metrics))
        lines.append(f"{made} saved in {made.save(run)}")
    order = sorted(rows, key=lambda row: row[1])  # known clients first; stable
    titles = [f"{TITLES[metrics[0]]}, {STATISTIC_TITLES[name]}" for name in _SHOWN]
    titles += [f"{TITLES[name]}, mean" for name in metrics[1:]]
    header = ("method", "clients", *titles, "without validation rows", "down, bytes")
    return TextTable("Personal models", header, tuple(order)), lines


def predict_for_client(
    run: Path, ensemble: Ensemble, x: Any, method: str, client: str
) -> Prediction:
    """The prediction of a client's personal model.

    Args:
        run: folder of the run.
        ensemble: of the run.
        x: inputs.
        method: of `fedensemble personalize`.
        client: name or index.
    """
    path = run / file_name(method)
    if not path.exists():
        raise InputError(
            f"{run} has no personal models of method '{method}': make them with fedensemble "
            f"personalize {run} --method {method}."
        )
    made = read_personalization(path, ensemble)
    known = client in (made.names or ())
    number = client.removeprefix("-").isdecimal()
    return made.predict(x, int(client) if number and not known else client)


def _row(made: Personalization, new: bool, metrics: tuple[str, ...]) -> tuple[str, ...]:
    found = summarize(made)
    facts = (str(int(found["without_rows"])), f"{made.bytes_down:,}")
    return (made.method, _group(new), *_cells(found, metrics), *facts)


def _group(new: bool) -> str:
    return "new" if new else "in training"


def _cells(found: Mapping[str, float], metrics: tuple[str, ...]) -> list[str]:
    names = [(metrics[0], name) for name in _SHOWN] + [(name, "mean") for name in metrics[1:]]
    return [
        show(metric, found[f"{metric}_{name}"]) if f"{metric}_{name}" in found else NONE
        for metric, name in names
    ]
