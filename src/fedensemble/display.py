"""How results show themselves: one line as text, and a small table in a notebook.

Tensors are summarized, never printed. Names come from users' data and are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import torch

from .text import printable, shorten

Facts = list[tuple[str, str]]  # name and value
_MOST_NAMES = 5  # class names in a list
_MOST_ROWS = 10  # classes in the table of a prediction


def html_table(title: str, facts: Facts) -> str:
    """An HTML table with one row per fact; all text is escaped.

    >>> html_table("A", [("classes", "<b>")])
    '<table><caption>A</caption><tr><th>classes</th><td>&lt;b&gt;</td></tr></table>'
    """
    rows = "".join(
        f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>" for name, value in facts
    )
    return f"<table><caption>{_escape(title)}</caption>{rows}</table>"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> count(1, "mode"), count(1200, "parameter"), count(2, "class", "classes")
    ('1 mode', '1,200 parameters', '2 classes')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def list_names(names: Sequence[str]) -> str:
    """The first names of a list, and how many there are if some are left out.

    >>> list_names(["cat", "dog"]), list_names([str(n) for n in range(10)])
    ('cat, dog', '0, 1, 2, 3, 4, ... (10)')
    """
    shown = ", ".join(shorten(name, 40) for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown}, ... ({len(names)})"


def size(number: float) -> str:
    """A number of bytes with its unit.

    >>> size(999), size(48400), size(24_200_000)
    ('999 B', '48.4 kB', '24.2 MB')
    """
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= unit_bytes:
            return f"{number / unit_bytes:.1f} {unit}"
    return f"{number:.0f} B"


def prediction_facts(prediction: Any) -> Facts:
    """The facts of a `Prediction`, other than those of single classes."""
    mean = prediction.mean
    shape = [f"{n:,}" for n in mean.shape[:-1]]
    facts = [("examples", " x ".join(shape) or "1"), ("modes", f"{len(prediction.modes):,}")]
    if len(prediction.members) > len(prediction.modes):
        facts.append(("members", f"{len(prediction.members):,}"))
    if prediction.task == "regression":
        spread = float(prediction.variance.double().sqrt().mean())
        return [*facts, ("outputs", f"{mean.shape[-1]:,}"), ("mean spread", f"{spread:.3g}")]
    facts.append(("classes", _classes(mean.shape[-1], prediction.class_names)))
    for name in ("entropy", "mutual_information"):
        value = float(getattr(prediction, name).double().mean())
        facts.append((f"mean {name.replace('_', ' ')}", f"{value:.3f} nats"))
    return facts


def prediction_line(prediction: Any) -> str:
    """A `Prediction` on one line."""
    examples = count(prediction.mean[..., 0].numel(), "example")
    modes, facts = count(len(prediction.modes), "mode"), dict(prediction_facts(prediction))
    if prediction.task == "regression":
        outputs = count(prediction.mean.shape[-1], "output")
        return f"Prediction({examples}, {outputs}, {modes}, mean spread {facts['mean spread']})"
    classes = count(prediction.mean.shape[-1], "class", "classes")
    return f"Prediction({examples}, {classes}, {modes}, mean entropy {facts['mean entropy']})"


def prediction_table(prediction: Any) -> str:
    """A `Prediction` as an HTML table, with the classes that it predicts most often."""
    facts = prediction_facts(prediction)
    if prediction.task == "classification":
        classes = prediction.mean.shape[-1]
        counts = torch.bincount(prediction.label.flatten().cpu(), minlength=classes)
        names = prediction.class_names or [f"class {number}" for number in range(classes)]
        order = counts.argsort(descending=True, stable=True)[:_MOST_ROWS].tolist()
        total = max(int(counts.sum()), 1)
        facts += [
            (f"predicted {shorten(names[c], 40)}", f"{number:,} ({number / total:.1%})")
            for c in order
            if (number := int(counts[c]))
        ]
    return html_table("Prediction", facts)


def ensemble_facts(ensemble: Any) -> Facts:
    """The facts of an `Ensemble`."""
    model = ensemble.model
    facts = [
        ("modes", f"{len(ensemble):,}"),
        ("parameters of a mode", f"{model.theta_layout.total:,}"),
        *frozen_facts(model),
        ("task", model.task),
    ]
    if ensemble.prediction_models > len(ensemble):
        facts.insert(1, ("models of a prediction", f"{ensemble.prediction_models:,}"))
    if ensemble.input_shape is not None:
        facts.append(("input shape", str(ensemble.input_shape)))
    if ensemble.class_names is not None:
        facts.append(("classes", _classes(len(ensemble.class_names), ensemble.class_names)))
    facts.append(("combination", ensemble.combine))
    return facts


def frozen_facts(model: Any) -> Facts:
    """The parameters that are not trained, if there are any."""
    if not model.frozen:
        return []
    total = sum(value.numel() for value in model.frozen.values())
    return [("frozen parameters", f"{total:,}, {size(model.frozen_bytes)}, once for all modes")]


def ensemble_line(ensemble: Any) -> str:
    """An `Ensemble` on one line."""
    facts = dict(ensemble_facts(ensemble))
    models = facts.get("models of a prediction")
    parts = [
        count(len(ensemble), "mode") + (f" with {models} models" if models else ""),
        f"{count(ensemble.model.theta_layout.total, 'parameter')} each",
        facts["task"],
    ]
    parts += [f"inputs {facts['input shape']}"] if "input shape" in facts else []
    parts += [f"classes {facts['classes']}"] if "classes" in facts else []
    return f"Ensemble({', '.join(parts)})"


def report_line(report: Any) -> str:
    """A `RoundReport` on one line."""
    loss = "no replies" if report.loss is None else f"loss {report.loss:.4g}"
    modes = ", ".join(map(str, report.trained[:_MOST_NAMES]))
    more = ", ..." if len(report.trained) > _MOST_NAMES else ""
    visits = count(len(report.plan.client), "visit")
    trained = f"modes {modes}{more}, " if report.trained else ""
    sent = f"{size(report.bytes_up)} up, {size(report.bytes_down)} down"
    return f"RoundReport(round {report.round}, age {report.age}, {loss}, {visits}, {trained}{sent})"


def report_table(report: Any) -> str:
    """A `RoundReport` as an HTML table."""
    return html_table(
        "Round",
        [
            ("round", f"{report.round:,}"),
            ("age", f"{report.age:,}"),
            ("training loss", "no replies" if report.loss is None else f"{report.loss:.4g}"),
            ("visits", f"{len(report.plan.client):,}"),
            ("modes trained", f"{len(report.trained):,}"),
            ("uploaded", size(report.bytes_up)),
            ("downloaded", size(report.bytes_down)),
        ],
    )


def federation_table(federation: Any, algorithm: str) -> str:
    """A `Federation` as an HTML table.

    Args:
        algorithm: its name.
    """
    schedule, data, records = federation.schedule, federation.data, federation.history.records
    facts = [
        ("algorithm", algorithm),
        ("modes", f"{schedule.modes:,}"),
        ("parameters of a mode", f"{federation.model.theta_layout.total:,}"),
        *frozen_facts(federation.model),
        ("clients", f"{len(data):,}, of which {schedule.clients_per_round:,} per round"),
        ("examples", f"{len(data.x):,}"),
        ("rounds trained", f"{federation.round:,}"),
    ]
    if data.class_names is not None:
        facts.insert(-1, ("classes", _classes(len(data.class_names), data.class_names)))
    if records and records[-1]["loss"] is not None:
        facts.append(("training loss", f"{records[-1]['loss']:.4g}"))
    for tested in [record for record in records if "test" in record][-1:]:
        for metric in ("accuracy", "mse"):
            if metric in tested["test"]:
                value = f"{tested['test'][metric]:.4g} (round {tested['round']:,})"
                facts.append((f"test {metric}", value))
    return html_table("Federation", facts)


def _classes(number: int, names: Sequence[str] | None) -> str:
    return f"{number:,}" if names is None else list_names(names)


def _escape(text: str) -> str:
    return escape(printable(text))
