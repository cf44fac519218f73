"""The risk-coverage curve: the share of errors if the ensemble answers only its surest rows."""

from __future__ import annotations

from typing import Any

from ..tables.result_table import show
from .charts import Chart, Line, line_chart


def risk_coverage_chart(content: Any) -> Chart:
    """The error rate among the surest predictions over the share that is answered."""
    selective, examples = content["selective"], content["examples"]
    coverage = selective["coverage"]
    right = 1 - selective["errors"] / examples
    # With errors last, the first error comes after all right predictions.
    ideal = [max(0.0, (share - right) / share) for share in coverage]
    answered = show("coverage_at_5_risk", selective["coverage_at_5_risk"])
    return line_chart(
        "risk-coverage",
        "Risk-coverage curve",
        [100 * share for share in coverage],
        [
            Line("surest first", [100 * risk for risk in selective["risk"]], "c0"),
            Line("errors last (ideal)", [100 * risk for risk in ideal], "ideal"),
        ],
        xlabel="answered, %",
        ylabel="errors among answered, %",
        format_value=lambda value: f"{value:.2f}",
        from_zero=True,
        note=(
            "If the ensemble answers only the predictions with the largest probability: how many "
            f"of the answers are wrong. AURC {show('aurc', selective['aurc'])} is the area under "
            f"the curve (best: 0), AUGRC is {show('augrc', selective['augrc'])}, and with at most "
            f"5 % errors {answered} % are answered."
        ),
    )
