"""Sections on the course of a run: curves of the ensemble and its modes, and their spread."""

from __future__ import annotations

from ..downsample import MAX_LOSS_POINTS, averaged, caption, grouped
from ..tables.result_table import NO_INTERVAL, PERCENT, TITLES, scaled
from .charts import Chart, Line, Point, line_chart, line_style, point_chart
from .run_data import RunData
from .summary_sections import Section, metric_format
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Format, Scale, scale, tag

WITHOUT_AVERAGE = "ensemble without average"
_AVERAGE = (
    "Test results are those of the average over rounds ({}). Where “without average” is written, "
    "the current modes predict."
)
FEW_MODES = 7  # up to this number, each mode has its own color


def curves(run: RunData) -> Section:
    """The section with the curves of the ensemble, its modes and the training loss."""
    charts = [
        mode_curves(run, metric)
        for metric in ("accuracy", "mse", "nll")
        if run.tested and metric in run.tested[0]["test"]
    ]
    charts += (
        [_training_loss(run)] if any(record["loss"] is not None for record in run.records) else []
    )
    text = "There is no test set, or no test yet: only the training loss is known."
    if run.tested:
        text = _AVERAGE.format(run.average) if run.average else ""
    return Section("curves", "Curves", text, charts)


def mode_curves(run: RunData, metric: str) -> Chart:
    """A test metric of the ensemble and of every mode over rounds, averaged if tests are many."""
    modes, tested = int(run.settings["ensemble"]["modes"]), run.tested
    x = [float(group[-1]["round"]) for group in grouped(tested)]
    form = metric_format(metric)
    ensemble = averaged([scaled(metric, record["test"][metric]) for record in tested])
    recorded = [record.get("modes", {}).get(metric, ()) for record in tested]
    # One tuple per point with the value of every mode; empty where tests recorded no modes.
    by_point: list[tuple[float, ...]] = []
    if all(len(values) == modes for values in recorded):
        by_mode = [
            averaged([scaled(metric, values[mode]) for values in recorded]) for mode in range(modes)
        ]
        by_point = list(zip(*by_mode, strict=True))
    tooltip = [("ensemble", [form(v) for v in ensemble])]
    lines = []
    if modes > 1 and by_point:
        for mode in range(modes):
            few = modes <= FEW_MODES
            name = f"mode {mode}" if few else "" if mode else f"the {modes} modes"
            style = f"thin {line_style(mode)}" if few else "thin c0 many"
            lines.append(Line(name, [values[mode] for values in by_point], style))
            if few:
                tooltip.append((f"mode {mode}", [form(values[mode]) for values in by_point]))
        if modes > FEW_MODES:
            tooltip += [
                ("mean of modes", [form(sum(values) / modes) for values in by_point]),
                ("lowest", [f"{form(min(v))} (mode {v.index(min(v))})" for v in by_point]),
                ("highest", [f"{form(max(v))} (mode {v.index(max(v))})" for v in by_point]),
            ]
    elif modes > 1 and f"mode_{metric}_min" in tested[0]["test"]:
        low, high = (
            averaged([scaled(metric, r["test"][f"mode_{metric}_{end}"]) for r in tested])
            for end in ("min", "max")
        )
        lines.append(Line("modes, worst to best", (), "c0", low, high))
    if all(metric in record.get("test_last", {}) for record in tested):
        last = averaged([scaled(metric, record["test_last"][metric]) for record in tested])
        lines.append(Line(WITHOUT_AVERAGE, last, "ideal"))
        tooltip.append((WITHOUT_AVERAGE, [form(v) for v in last]))
    lines.append(Line("ensemble", ensemble, "ensemble"))
    return line_chart(
        f"curve-{metric}",
        f"Test {TITLES[metric]} over rounds",
        x,
        lines,
        xlabel="round",
        ylabel=f"test {TITLES[metric]}",
        format_value=form,
        tooltip=tooltip,
        note=caption(len(tested)),
    )


def _training_loss(run: RunData) -> Chart:
    """The training loss over rounds, averaged if rounds are many.

    Rounds in which no client replied have no loss.
    """
    records = [record for record in run.records if record["loss"] is not None]
    x = [float(group[-1]["round"]) for group in grouped(records, MAX_LOSS_POINTS)]
    loss = averaged([record["loss"] for record in records], MAX_LOSS_POINTS)
    note = caption(len(records), MAX_LOSS_POINTS, "rounds")
    return line_chart(
        "loss",
        "Training loss of the round's clients",
        x,
        [Line("training loss", loss, "c0")],
        xlabel="round",
        ylabel="training loss",
        format_value=metric_format("nll"),
        note=note,
    )


def spread(run: RunData) -> Section:
    """The section on the differences between modes: at the last test and over rounds."""
    title, modes = "Spread of the modes", int(run.settings["ensemble"]["modes"])
    if not run.tested:
        return Section("spread", title, "Without a test, the modes cannot be compared.")
    if modes == 1:
        return Section("spread", title, "There is one mode, so there is no spread.")
    charts, metric = [], run.metric
    last = run.tested[-1]
    last_values = last.get("modes", {}).get(metric)
    if last_values:
        charts.append(
            _last_modes(
                metric,
                [scaled(metric, v) for v in last_values],
                scaled(metric, last["test"][metric]),
            )
        )
    shown = [
        name for name in ("disagreement", "mutual_information", "variance") if name in last["test"]
    ]
    x = [float(group[-1]["round"]) for group in grouped(run.tested)]
    for at, name in enumerate(shown):
        values = averaged([scaled(name, record["test"][name]) for record in run.tested])
        charts.append(
            line_chart(
                f"spread-{name.replace('_', '-')}",
                f"{TITLES[name].capitalize()} over rounds",
                x,
                [Line(TITLES[name], values, line_style(at + 1))],
                xlabel="round",
                ylabel=TITLES[name],
                format_value=metric_format(name),
                from_zero=True,
                note=caption(len(run.tested)),
            )
        )
    return Section(
        "spread",
        title,
        "Disagreement: how often two modes choose different classes. Mutual information: "
        "the part of the entropy that comes from the modes disagreeing."
        if "disagreement" in shown
        else f"Variance: the mean over test examples of the variance over modes. {NO_INTERVAL}",
        charts,
    )


def _last_modes(metric: str, values: list[float], ensemble: float) -> Chart:
    """The last result of every mode, sorted, with the ensemble's as a line."""
    order = sorted(range(len(values)), key=lambda mode: values[mode])
    form: Format = (lambda v: f"{v:.2f}") if metric in PERCENT else metric_format(metric)
    x_scale = Scale(0.0, len(values) + 1.0, LEFT, WIDTH - RIGHT)
    y_scale = scale([*values, ensemble], HEIGHT - BOTTOM, TOP, margin=0.1)
    labels = (
        {float(place + 1): f"{mode}" for place, mode in enumerate(order)}
        if len(values) <= 10
        else {}
    )
    named: Format = lambda v: labels.get(v, "")  # noqa: E731
    rule = tag(
        "line",
        x1=LEFT,
        x2=WIDTH - RIGHT,
        y1=y_scale(ensemble),
        y2=y_scale(ensemble),
        class_="line ensemble",
    )
    points = [
        Point(
            place + 1.0,
            values[mode],
            f"mode {mode}\n{TITLES[metric]}: {form(values[mode])}\nensemble: {form(ensemble)}",
        )
        for place, mode in enumerate(order)
    ]
    return point_chart(
        "modes-last",
        "Each mode at the last test, from low to high",
        points,
        xlabel="modes, sorted",
        ylabel=f"test {TITLES[metric]}",
        x_scale=x_scale,
        y_scale=y_scale,
        overlay=[rule],
        xformat=named,
        radius=4.0 if len(values) <= 30 else 2.5,
        header=("mode", TITLES[metric]),
        rows=[(f"{mode}", form(values[mode])) for mode in order],
        legend=[("a mode", "dot c0"), ("ensemble", "line ensemble")],
    )
