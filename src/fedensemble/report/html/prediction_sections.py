"""Sections on the predictions of the test set and on the data of the clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables.result_table import NO_INTERVAL
from .charts import Bars, Chart, Point, bar_chart, point_chart
from .heatmap import grid_chart
from .risk_coverage_chart import risk_coverage_chart
from .run_data import RunData
from .summary_sections import Section
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, format_number, path, scale, tag

TWO_SIDED_95 = 1.96  # standard deviations that contain 95 % of a normal distribution
FEW = 10  # below this number of test examples, the accuracy of a bin means little


def predictions(run: RunData) -> list[Section]:
    """Calibration, entropy, risk and confusion matrix, or residuals and spreads for regression."""
    content = run.predictions
    regression = run.metric == "mse"
    if not content:
        if not run.done:
            why = "Predictions are recorded when the run is finished."
        elif not run.tested:
            why = "There is no test set."
        else:
            why = (
                "This run was made without predictions.json; run it again into another folder to "
                "get them."
            )
        return [Section("calibration", "Residuals" if regression else "Predictions", why)]
    if regression:
        return [_residuals(content)]
    calibration = [*_calibration(content), _entropy(content)]
    # Runs of earlier versions were made without this curve.
    calibration += [risk_coverage_chart(content)] if "selective" in content else []
    text = (
        "Of the predictions made with 80 % confidence, 80 % should be right: bars below the "
        "diagonal mean overconfidence. Entropy measures the uncertainty of the ensemble: the more "
        "it differs between right and wrong predictions, the better the ensemble knows its errors."
    )
    if run.summary.get("calibration"):
        text += " The ensemble is shown after calibration, single modes without it."
    return [
        Section("calibration", "Calibration and entropy", text, calibration),
        _confusion(content),
    ]


def _calibration(content: Any) -> list[Chart]:
    ensemble, modes = content["calibration"], content["calibration_modes"]
    bins = len(ensemble["count"])
    edges = [at / bins for at in range(bins + 1)]
    y_scale = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    x_scale = Scale(0.0, 1.0, LEFT, WIDTH - RIGHT)
    overlay = [
        tag(
            "path",
            d=path([(x_scale(0), y_scale(0)), (x_scale(1), y_scale(1))]),
            class_="line ideal",
        )
    ]
    legend = [("perfectly calibrated", "line ideal")]
    if content["modes"] > 1:
        places = [
            (c, a)
            for c, a, n in zip(modes["confidence"], modes["accuracy"], modes["count"], strict=True)
            if n >= FEW
        ]
        overlay.append(
            tag("path", d=path((x_scale(c), y_scale(a)) for c, a in places), class_="line c1 thin")
        )
        overlay += [
            tag("circle", cx=x_scale(c), cy=y_scale(a), r=2.5, class_="dot c1") for c, a in places
        ]
        legend.append(("single modes, together", "line c1"))
    tooltip = [
        [f"{n:,}", f"{100 * a:.1f} %" if n else "–", f"{100 * c:.1f} %" if n else "–"]
        for n, a, c in zip(
            ensemble["count"], ensemble["accuracy"], ensemble["confidence"], strict=True
        )
    ]
    pairs = list(zip(ensemble["accuracy"], ensemble["count"], strict=True))
    bars = [Bars("ensemble", [a if n >= FEW else 0.0 for a, n in pairs], "c0")]
    if any(0 < n < FEW for _, n in pairs):
        bars.append(
            Bars(
                f"ensemble, fewer than {FEW} examples",
                [a if 0 < n < FEW else 0.0 for a, n in pairs],
                "c0 l2",
            )
        )
    chart = bar_chart(
        "calibration",
        "Calibration diagram",
        edges,
        bars,
        xlabel="confidence",
        ylabel="share that is right",
        overlay=overlay,
        y_scale=y_scale,
        tooltip=tooltip,
        header=("examples", "right", "mean confidence"),
        legend=legend,
    )
    counts = bar_chart(
        "confidence",
        "How confident the ensemble is",
        edges,
        [Bars("test examples", ensemble["count"], "c0")],
        xlabel="confidence",
        ylabel="test examples",
    )
    return [chart, counts]


def _entropy(content: Any) -> Chart:
    entropy = content["entropy"]
    bars = len(entropy["right"])
    edges = [
        entropy["most"] * at / bars if entropy["most"] else at / bars for at in range(bars + 1)
    ]
    rights, wrongs = sum(entropy["right"]), sum(entropy["wrong"])
    shares = {
        name: [value / (sum(entropy[name]) or 1) * 100 for value in entropy[name]]
        for name in ("right", "wrong")
    }
    tooltip = [
        [f"{r:,}", f"{w:,}"] for r, w in zip(entropy["right"], entropy["wrong"], strict=True)
    ]
    return bar_chart(
        "entropy",
        "Entropy of right and wrong predictions",
        edges,
        [
            Bars(f"right ({rights:,})", shares["right"], "c0 half"),
            Bars(f"wrong ({wrongs:,})", shares["wrong"], "c1 half"),
        ],
        xlabel="entropy, nats",
        ylabel="share of each group, %",
        tooltip=tooltip,
        header=("right", "wrong"),
    )


def _confusion(content: Any) -> Section:
    counts, labels = content["confusion"], content["labels"]
    totals = [sum(line) or 1 for line in counts]
    rows = []
    for at, (line, label) in enumerate(zip(counts, labels, strict=True)):
        wrong = [(count, labels[c]) for c, count in enumerate(line) if c != at and count]
        most = max(wrong, default=(0, ""), key=lambda pair: pair[0])
        rows.append(
            (
                label,
                f"{sum(line):,}",
                f"{100 * line[at] / totals[at]:.1f}",
                f"{most[1]} ({most[0]})" if wrong else "–",
            )
        )
    chart = grid_chart(
        "confusion",
        "Confusion matrix",
        counts,
        rows=labels,
        columns=labels,
        row="true class",
        column="predicted",
        share="row",
        style="c1",
        diagonal="c0",
        header=("class", "test examples", "right, %", "most often taken for"),
        table=rows,
        legend=[("right", "bar c0"), ("wrong", "bar c1")],
        note="Shade: share of the true class.",
    )
    return Section("confusion", "Confusion matrix", "", [chart])


def _residuals(content: Any) -> Section:
    residuals = content["residuals"]
    charts = [_targets(content)] if "points" in content else []
    charts.append(
        bar_chart(
            "residuals",
            "Residuals: prediction less target",
            _edges(-residuals["reach"], residuals["reach"], residuals["count"]),
            [Bars("test examples", residuals["count"], "c0")],
            xlabel="residual",
            ylabel="test examples",
        )
    )
    if "spreads" in content:
        charts.append(_spreads(content["spreads"]))
    text = (
        ""
        if "spreads" in content
        else "One mode has no spread, so there is no uncertainty to show."
    )
    if "points" not in content:
        text = f"Single targets are not published. {text}".strip()
    return Section("calibration", "Residuals and uncertainty", text, charts)


def _targets(content: Any) -> Chart:
    """Predictions against targets, one dot per test example."""
    points = content["points"]
    both = [*points["target"], *points["mean"]]
    bar_ends = [
        m + sign * s
        for m, s in zip(points["mean"], points["spread"], strict=True)
        for sign in (-1, 1)
    ]
    x_scale, y_scale = (
        scale(points["target"], LEFT, WIDTH - RIGHT),
        scale([*both, *bar_ends], HEIGHT - BOTTOM, TOP),
    )
    ends = [max(x_scale.low, y_scale.low), min(x_scale.high, y_scale.high)]
    diagonal = tag("path", d=path([(x_scale(v), y_scale(v)) for v in ends]), class_="line ideal")
    dots = [
        Point(t, m, f"target {t:.4g}\nprediction {m:.4g} ± {s:.3g}", "c0 half", s)
        for t, m, s in zip(points["target"], points["mean"], points["spread"], strict=True)
    ]
    note = (
        f"{len(dots):,} of {content['examples']:,} test examples, evenly chosen. "
        if len(dots) < content["examples"]
        else ""
    )
    if content["modes"] > 1:
        note += f"{NO_INTERVAL} {_coverage(points)}"
    return point_chart(
        "predictions",
        "Predictions and targets",
        dots,
        xlabel="target",
        ylabel="prediction",
        x_scale=x_scale,
        y_scale=y_scale,
        overlay=[diagonal],
        radius=2.5,
        legend=[("prediction ± spread of modes", "dot c0"), ("exact", "line ideal")],
        note=note.strip(),
        header=("target", "prediction", "spread"),
        rows=[
            (f"{t:.4g}", f"{m:.4g}", f"{s:.3g}")
            for t, m, s in zip(points["target"], points["mean"], points["spread"], strict=True)
        ][:100],
    )


def _coverage(points: Any) -> str:
    """A sentence on how many targets lie where 95 % of them would if the spread were the error."""
    inside = [
        abs(t - m) <= TWO_SIDED_95 * s
        for t, m, s in zip(points["target"], points["mean"], points["spread"], strict=True)
    ]
    share = 100 * sum(inside) / len(inside)
    return (
        f"Prediction ± {TWO_SIDED_95} spreads contains {share:.0f} % of these targets; "
        "an interval of 95 % would contain 95 %."
    )


def _spreads(spreads: Any) -> Chart:
    """Error against spread of the modes, one dot per tenth of the test set."""
    both = [0.0, *spreads["spread"], *spreads["error"]]
    x_scale, y_scale = (
        scale(spreads["spread"], LEFT, WIDTH - RIGHT),
        scale(both, HEIGHT - BOTTOM, TOP),
    )
    ends = [max(x_scale.low, y_scale.low), min(x_scale.high, y_scale.high)]
    ideal = tag("path", d=path([(x_scale(v), y_scale(v)) for v in ends]), class_="line ideal")
    rows = [
        (format_number(n), f"{s:.3g}", f"{e:.3g}")
        for n, s, e in zip(spreads["count"], spreads["spread"], spreads["error"], strict=True)
    ]
    dots = [
        Point(s, e, f"{n:,} examples\nspread {s:.3g}\nerror {e:.3g}")
        for n, s, e in zip(spreads["count"], spreads["spread"], spreads["error"], strict=True)
    ]
    return point_chart(
        "spreads",
        "Error against spread of the modes",
        dots,
        xlabel="spread (root mean square)",
        ylabel="error (root mean square)",
        x_scale=x_scale,
        y_scale=y_scale,
        overlay=[ideal],
        radius=4.0,
        header=("examples", "spread", "error"),
        rows=rows,
        legend=[("a tenth of the test set", "dot c0"), ("error = spread", "line ideal")],
        note=f"{NO_INTERVAL} Dots above the line have larger errors than spreads.",
    )


def clients(run: RunData) -> Section:
    """The section on the clients: their sizes, or their examples by class."""
    content, title = run.clients, "Clients and classes"
    if not content:
        return Section(
            "clients",
            title,
            "This run's folder has no clients.json, so its clients cannot be shown.",
        )
    totals = f"{content['clients']:,} clients hold {content['examples']:,} examples"
    if content.get("published") is False:
        text = f"{totals}. Single clients are not published."
        return Section("clients", "Clients", text)
    shown = len(content["size"])
    names = content["names"] or [str(client) for client in range(shown)]
    text = f"{totals} ({content['source']}, {content['partition']})."
    note = (
        f"The first {shown} of {content['clients']:,} clients."
        if shown < content["clients"]
        else ""
    )
    if "counts" not in content:
        edges = [float(at) for at in range(shown + 1)]
        chart = bar_chart(
            "clients",
            "Examples of each client",
            edges,
            [Bars("examples", content["size"], "c0")],
            xlabel="client",
            ylabel="examples",
            names=names,
            note=note,
        )
        return Section("clients", "Clients", text, [chart])
    # transposed: one row per class, one column per client
    counts: Sequence[Sequence[int]] = list(zip(*content["counts"], strict=True))
    short = [name if len(name) <= 8 else str(at) for at, name in enumerate(names)]
    chart = grid_chart(
        "clients",
        "Examples of each class at each client",
        counts,
        rows=content["labels"],
        columns=short,
        row="class",
        column="client",
        share="column",
        wide=True,
        note=f"Shade: share of the client's examples. {note}".strip(),
        header=("client", "examples", "classes"),
        table=[
            (name, f"{size:,}", f"{sum(1 for count in row if count)}")
            for name, size, row in zip(names, content["size"], content["counts"], strict=True)
        ],
    )
    return Section("clients", title, text, [chart])


def _edges(low: float, high: float, values: Sequence[float]) -> list[float]:
    return [low + (high - low) * at / len(values) for at in range(len(values) + 1)]
