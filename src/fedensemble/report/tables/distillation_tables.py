"""Tables that compare a distilled model with the ensemble it learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .result_table import TITLES, TextTable, in_megabytes, show

_SCORES = {
    "max_probability": "max probability",
    "mutual_information": "mutual information",
    "variation_ratio": "variation ratio",
}
_PAIR = ("teacher", "student")


def distillation_tables(facts: Mapping[str, Any]) -> list[TextTable]:
    """The metrics on the test set, and how well each score of uncertainty finds unusual inputs.

    Args:
        facts: content of distillation.json. Without a test set there is only the size.
    """
    teacher, student = (facts[name] for name in _PAIR)
    header = ("metric", f"ensemble of {teacher['modes']} modes", "distilled model")
    of_modes = ("mode_",) if "test" in student else ()
    rows = [
        (TITLES.get(name, name), *(show(name, facts[key]["test"][name]) for key in _PAIR))
        for name in student.get("test", {})
        if not name.startswith(of_modes)
    ]
    rows += [
        ("models", str(teacher["models"]), str(student["models"])),
        ("size, MB", in_megabytes(teacher["bytes"]), in_megabytes(student["bytes"])),
    ]
    tables = [TextTable("The ensemble and the distilled model", header, tuple(rows))]
    if "ood" in student:
        unlike = facts["ood_inputs"]
        title = f"Detection of {unlike['count']:,} unusual inputs: {unlike['what']}"
        scores = ("score", "AUROC, ensemble", "AUROC, distilled", "FPR95, ensemble")
        detection = [
            (
                _SCORES.get(score, score),
                *(
                    f"{facts[key]['ood'][score][metric]:.3f}"
                    for metric in ("auroc", "fpr95")
                    for key in _PAIR
                ),
            )
            for score in student["ood"]
        ]
        tables.append(TextTable(title, (*scores, "FPR95, distilled"), tuple(detection)))
    return tables
