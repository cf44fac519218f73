"""Sections on prediction sets of clients, inputs out of distribution, and unsure examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..tables.result_table import TITLES, TextTable, show
from .charts import Bars, Chart, Point, bar_chart, point_chart
from .run_data import RunData
from .summary_sections import Section
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, path, scale, tag

_SCORES = {
    "max_probability": "largest probability",
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "energy": "energy",
    "variation_ratio": "variation ratio",
}
# Of a detection, in the order of the table.
_METRICS = ("auroc", "aupr_in", "aupr_out", "fpr95")
_CHARTED = ("entropy", "mutual_information")  # scores with a histogram


def uncertainty(run: RunData) -> list[Section]:
    """The sections that the run has values for."""
    content = run.predictions
    sections = []
    if "sets" in content:
        sections.append(_sets(content["sets"]))
    if "ood" in content:
        sections.append(_out_of_distribution(content["ood"]))
    if "unsure" in content:
        sections.append(_unsure(content["unsure"]))
    return sections


def _sets(content: Any) -> Section:
    """Coverage and size of prediction sets or intervals, over clients."""
    intervals = content["task"] == "regression"
    what = "intervals" if intervals else "sets"
    level = 100 * content["level"]
    text = f"Prediction {what} that should contain the truth in {level:g} % of all cases. "
    if "worst_tenth" in content:
        worst = 100 * content["worst_tenth"]
        text += f"In the worst tenth of the clients they contain it in {worst:.1f} %. "
    charts = []
    if "clients" in content:
        charts += _over_clients(content["clients"], content["level"], intervals)
    elif "worst_tenth" in content:
        text += "Single clients are not published."
    if "sizes" in content:
        charts.append(_sizes(content["sizes"]))
    return Section("sets", f"Prediction {what}", text.strip(), charts)


def _over_clients(clients: Any, level: float, intervals: bool) -> list[Chart]:
    """Coverage of each client from the worst to the best, and size in the same order."""
    count, size_name = len(clients["names"]), "width" if intervals else "classes per set"
    tenth = math.ceil(count / 10)
    texts = [
        f"{name}\n{100 * coverage:.1f} % of {rows:,} test rows\n{size_name} {size:.3g}"
        for name, coverage, rows, size in zip(
            clients["names"], clients["coverage"], clients["rows"], clients["size"], strict=True
        )
    ]
    styles = ["c1" if at < tenth else "c0" for at in range(count)]
    x_scale = Scale(0.0, count + 1.0, LEFT, WIDTH - RIGHT)
    rows = [
        (name, f"{n:,}", f"{100 * coverage:.1f}", f"{size:.3g}")
        for name, n, coverage, size in zip(
            clients["names"], clients["rows"], clients["coverage"], clients["size"], strict=True
        )
    ]
    note = (
        f"{count} of {clients['count']:,} clients, evenly chosen. "
        if count < clients["count"]
        else ""
    )
    charts = []
    for ident, title, values, ylabel, aim in (
        ("client-coverage", "Coverage of each client", clients["coverage"], "coverage, %", level),
        ("client-size", f"Mean {size_name} of each client", clients["size"], size_name, None),
    ):
        shown = [100 * value for value in values] if aim is not None else list(values)
        ends = [0.0, 100.0] if aim is not None else [0.0, *shown]
        y_scale = scale(ends, HEIGHT - BOTTOM, TOP)
        overlay = []
        legend = [("worst tenth", "dot c1"), ("other clients", "dot c0")]
        if aim is not None:
            line = [(x, y_scale(100 * aim)) for x in (LEFT, WIDTH - RIGHT)]
            overlay.append(tag("path", d=path(line), class_="line ideal"))
            legend.append((f"asked for: {100 * aim:g} %", "line ideal"))
        points = [
            Point(at + 1.0, value, text, style)
            for at, (value, text, style) in enumerate(zip(shown, texts, styles, strict=True))
        ]
        charts.append(
            point_chart(
                ident,
                title,
                points,
                xlabel="clients, by coverage",
                ylabel=ylabel,
                x_scale=x_scale,
                y_scale=y_scale,
                overlay=overlay,
                header=("client", "test rows", "coverage, %", size_name),
                rows=rows,
                legend=legend,
                note=(
                    f"{note}The coverage of a client with few test rows is mostly noise."
                    if aim is not None
                    else ""
                ),
            )
        )
    return charts


def _sizes(sizes: Sequence[int]) -> Chart:
    """How many sets have how many classes."""
    total, last = sum(sizes) or 1, len(sizes) - 1
    return bar_chart(
        "set-sizes",
        "Classes in each set",
        [at - 0.5 for at in range(len(sizes) + 1)],
        [Bars("share of the test examples, %", [100 * size / total for size in sizes], "c0")],
        xlabel="classes",
        ylabel="share of the test examples, %",
        names=[*map(str, range(last)), str(last)],
        note="An empty set: no class fits as well as true classes do." if sizes[0] else "",
    )


def _out_of_distribution(content: Any) -> Section:
    """Histograms of scores for known inputs and for others, and how well they are told apart."""
    charts, rows = [], []
    for at, (name, found) in enumerate(content.items()):
        for score, values in found["scores"].items():
            cells = [show(metric, values[metric]) for metric in _METRICS]
            rows.append((name, _SCORES[score], *cells))
            if score in _CHARTED:
                charts.append(_scores(f"ood-{at}-{score}", name, score, values))
    header = ("data", "score", *(TITLES[metric] for metric in _METRICS))
    table = TextTable("Detection of inputs out of distribution", header, tuple(rows))
    text = (
        "Scores of uncertainty for the test set and for inputs of other data. The less the "
        "histograms overlap, the better the ensemble knows what it was not trained for."
    )
    return Section("ood", "Inputs out of distribution", text, charts, [table])


def _scores(ident: str, name: str, score: str, values: Any) -> Chart:
    """Two histograms of one score."""
    bins, low, high = len(values["known"]), values["low"], values["high"]
    shares = [
        [100 * count / (sum(values[group]) or 1) for count in values[group]]
        for group in ("known", "other")
    ]
    return bar_chart(
        ident,
        f"{_SCORES[score].capitalize()}: test set and {name}",
        [low + (high - low) * at / bins for at in range(bins + 1)],
        [Bars("test set", shares[0], "c0 half"), Bars(name, shares[1], "c1 half")],
        xlabel=_SCORES[score],
        ylabel="share of each group, %",
        tooltip=[[f"{a:.1f} %", f"{b:.1f} %"] for a, b in zip(*shares, strict=True)],
        header=("test set", name),
        note=f"AUROC {show('auroc', values['auroc'])} %.",
    )


def _unsure(examples: Sequence[Any]) -> Section:
    """The test images with the highest entropy."""
    gallery = []
    for example in examples:
        right = example["label"] == example["target"]
        lines = [
            f"{example['label']}, {100 * example['probability']:.0f} %",
            "right" if right else f"wrong: {example['target']}",
            f"entropy {example['entropy']:.2f}",
        ]
        if "set" in example:
            lines.append(f"set: {', '.join(example['set']) or 'empty'}")
        gallery.append((f"data:image/png;base64,{example['png']}", lines))
    return Section(
        "unsure",
        "Most uncertain examples",
        "The test images of the highest entropy: the predicted class with its probability, and "
        "whether it is right.",
        gallery=gallery,
    )
