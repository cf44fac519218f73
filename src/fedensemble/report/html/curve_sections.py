"""Sections on how a run went: curves of the ensemble and its modes, and how far the modes are
apart.
"""

from __future__ import annotations

from ..downsample import MOST_ROUNDS, averaged, caption, grouped
from ..tables import PERCENT, TITLES
from .charts import Chart, Line, Point, line_chart, look, point_chart
from .run_data import RunData
from .summary_sections import Section, reader, scaled
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Format, Scale, scale, tag

FEW_MODES = 7  # each with a colour of its own


def curves(run: RunData) -> Section:
    """The ensemble and each of its modes over rounds, and the training loss."""
    charts = [
        mode_curves(run, metric)
        for metric in ("accuracy", "mse", "nll")
        if run.tested and metric in run.tested[0]["test"]
    ]
    charts += [_training(run)] if any(record["loss"] is not None for record in run.records) else []
    text = "" if run.tested else "No test set, or none used yet: only the training loss is known."
    return Section("curves", "Curves", text, charts)


def mode_curves(run: RunData, metric: str) -> Chart:
    """A test metric of the ensemble and of every mode; of many tests the mean over some at a
    time.
    """
    modes, tested = int(run.settings["ensemble"]["modes"]), run.tested
    x = [float(group[-1]["round"]) for group in grouped(tested)]
    form = reader(metric)
    whole = averaged([scaled(metric, record["test"][metric]) for record in tested])
    known = [record.get("modes", {}).get(metric, ()) for record in tested]
    apart: list[tuple[float, ...]] = []
    if all(len(values) == modes for values in known):
        each = [
            averaged([scaled(metric, values[mode]) for values in known]) for mode in range(modes)
        ]
        apart = list(zip(*each, strict=True))
    told = [("ensemble", [form(v) for v in whole])]
    lines = []
    if modes > 1 and apart:
        for mode in range(modes):
            few = modes <= FEW_MODES
            name = f"mode {mode}" if few else "" if mode else f"the {modes} modes"
            style = f"thin {look(mode)}" if few else "thin c0 many"
            lines.append(Line(name, [values[mode] for values in apart], style))
            if few:
                told.append((f"mode {mode}", [form(values[mode]) for values in apart]))
        if modes > FEW_MODES:
            told += [
                ("mean of modes", [form(sum(values) / modes) for values in apart]),
                ("lowest", [f"{form(min(v))} (mode {v.index(min(v))})" for v in apart]),
                ("highest", [f"{form(max(v))} (mode {v.index(max(v))})" for v in apart]),
            ]
    elif modes > 1 and f"mode_{metric}_min" in tested[0]["test"]:
        low, high = (
            averaged([scaled(metric, r["test"][f"mode_{metric}_{end}"]) for r in tested])
            for end in ("min", "max")
        )
        lines.append(Line("modes, worst to best", (), "c0", low, high))
    lines.append(Line("ensemble", whole, "ensemble"))
    return line_chart(
        f"curve-{metric}",
        f"Test {TITLES[metric]} over rounds",
        x,
        lines,
        xlabel="round",
        ylabel=f"test {TITLES[metric]}",
        shown=form,
        told=told,
        note=caption(len(tested)),
    )


def _training(run: RunData) -> Chart:
    """The training loss; of many rounds the mean over some at a time. Rounds that nobody answered
    have none.
    """
    records = [record for record in run.records if record["loss"] is not None]
    x = [float(group[-1]["round"]) for group in grouped(records, MOST_ROUNDS)]
    loss = averaged([record["loss"] for record in records], MOST_ROUNDS)
    note = caption(len(records), MOST_ROUNDS, "rounds")
    return line_chart(
        "loss",
        "Training loss of the round's clients",
        x,
        [Line("training loss", loss, "c0")],
        xlabel="round",
        ylabel="training loss",
        shown=reader("nll"),
        note=note,
    )


def spread(run: RunData) -> Section:
    """How far the modes are apart: in the end, and over rounds."""
    title, modes = "Spread of the modes", int(run.settings["ensemble"]["modes"])
    if not run.tested:
        return Section("spread", title, "Without a test there is nothing to compare the modes on.")
    if modes == 1:
        return Section("spread", title, "There is one mode, so there is no spread.")
    charts, metric = [], run.metric
    last = run.tested[-1]
    each = last.get("modes", {}).get(metric)
    if each:
        charts.append(
            _last_modes(
                metric, [scaled(metric, v) for v in each], scaled(metric, last["test"][metric])
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
                [Line(TITLES[name], values, look(at + 1))],
                xlabel="round",
                ylabel=TITLES[name],
                shown=reader(name),
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
        else "Variance: the mean over test examples of the variance over modes.",
        charts,
    )


def _last_modes(metric: str, each: list[float], whole: float) -> Chart:
    """Every mode's last result beside the ensemble's, sorted."""
    order = sorted(range(len(each)), key=lambda mode: each[mode])
    form: Format = (lambda v: f"{v:.2f}") if metric in PERCENT else reader(metric)
    across = Scale(0.0, len(each) + 1.0, LEFT, WIDTH - RIGHT)
    up = scale([*each, whole], HEIGHT - BOTTOM, TOP, room=0.1)
    places = (
        {float(place + 1): f"{mode}" for place, mode in enumerate(order)} if len(each) <= 10 else {}
    )
    named: Format = lambda v: places.get(v, "")  # noqa: E731
    rule = tag(
        "line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(whole), y2=up(whole), class_="line ensemble"
    )
    points = [
        Point(
            place + 1.0,
            each[mode],
            f"mode {mode}\n{TITLES[metric]}: {form(each[mode])}\nensemble: {form(whole)}",
        )
        for place, mode in enumerate(order)
    ]
    return point_chart(
        "modes-last",
        "Each mode at the last test, from low to high",
        points,
        xlabel="modes, sorted",
        ylabel=f"test {TITLES[metric]}",
        across=across,
        up=up,
        over=[rule],
        xformat=named,
        radius=4.0 if len(each) <= 30 else 2.5,
        header=("mode", TITLES[metric]),
        rows=[(f"{mode}", form(each[mode])) for mode in order],
        legend=[("a mode", "dot c0"), ("ensemble", "line ensemble")],
    )
