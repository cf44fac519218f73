"""The section on how a distilled model was made, and what it keeps of the ensemble."""

from __future__ import annotations

from ..distillation_tables import distillation_tables
from .charts import Line, downsample_indices, line_chart
from .run_data import RunData
from .summary_sections import Section

_WHAT_IT_LEARNS = {
    "plain": "It learned the mean prediction. A single prediction has no disagreement: its mutual "
    "information is 0, and its variation ratio, too.",
    "dirichlet": "It learned a Dirichlet distribution over class probabilities from the members' "
    "predictions, so that it has mutual information without members.",
}


def distillation(run: RunData) -> Section:
    """The loss over epochs, and tables of metrics and of detection of unusual inputs."""
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
    tables = distillation_tables(facts)
    return Section("distillation", "Distillation", text.strip(), [chart], tables)
