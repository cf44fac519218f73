"""The section on how a distilled model was made, and what it keeps of the ensemble."""

from __future__ import annotations

from ..tables.distillation_tables import distillation_tables
from ..tables.result_table import TITLES, show
from .charts import Line, downsample_indices, line_chart
from .run_data import RunData
from .summary_sections import Section, megabytes

_WHAT_IT_LEARNS = {
    "plain": "It learned the mean prediction. A single prediction has no disagreement: its mutual "
    "information is 0, and its variation ratio, too.",
    "dirichlet": "It learned a Dirichlet distribution over class probabilities from the members' "
    "predictions, so that it has mutual information without members.",
}


def distilled_figures(run: RunData) -> list[tuple[str, str]]:
    """The most important results of the distilled model, beside those of the ensemble."""
    teacher, student = run.distillation["teacher"], run.distillation["student"]
    tested = student.get("test", {})
    shown = [
        (TITLES[name], show(name, tested[name]))
        for name in ("accuracy", "mse", "nll", "ece")
        if name in tested
    ]
    if run.metric in tested:
        value = show(run.metric, teacher["test"][run.metric])
        shown.insert(1, (f"ensemble, {TITLES[run.metric]}", value))
    size, before = megabytes(student["bytes"]), megabytes(teacher["bytes"])
    return [
        *shown,
        ("size", f"{size} of {before}"),
        ("distillation", f"{run.distillation['seconds']:,.1f} s"),
    ]


def distillation(run: RunData) -> list[Section]:
    """The loss over epochs and the metrics of both models, and the detection of unusual inputs."""
    facts = run.distillation
    settings, losses = facts["settings"], facts["loss"]
    teacher, start = facts["teacher"], facts["student"]["start"]
    begins = "random parameters" if start is None else f"mode {start}"
    what = _WHAT_IT_LEARNS[settings["kind"]] if run.metric == "accuracy" else ""
    text = (
        f"One model, distilled from the {teacher['modes']} modes of {teacher['path']} in "
        f"{settings['epochs']} epochs on {facts['inputs']:,} inputs without labels, from {begins} "
        f"on. {what}"
    )
    indices = downsample_indices(len(losses))
    chart = line_chart(
        "distillation-loss",
        "Loss of the distillation",
        [float(at + 1) for at in indices],
        [Line("loss", [losses[at] for at in indices], "c0")],
        xlabel="epoch",
        ylabel="loss",
    )
    metrics, *detection = distillation_tables(facts)
    sections = [Section("distillation", "Distillation", text.strip(), [chart], [metrics])]
    if detection:
        what = (
            "How well each score of uncertainty tells test inputs from unusual ones: AUROC is 1 "
            "for a perfect score and 0.5 for a useless one; FPR95 is the share of test inputs that "
            "are taken for unusual if 95 % of the unusual ones are found."
        )
        sections.append(Section("unusual", "Unusual inputs", what, tables=detection))
    return sections
