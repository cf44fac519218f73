"""Implements `fedensemble advise`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ...config.schema import Config
from ...errors import InputError
from ...experiment.studies.advise import CANDIDATES, Advice, make_advice, pilot_rounds, plan_pilot
from ...experiment.studies.compare import compare
from ...report.comparison_report import int_
from ...report.comparison_report import names as split_names
from ...report.tables.result_table import NONE, TITLES, TextTable, show
from ..config import load_config
from ..console import console, print_line, print_table
from ..progress import ProgressDisplay

FEW_CLIENTS = 2  # per mode and round; below, a mode follows the labels of single clients


def advise(
    file: Path | None,
    settings: Sequence[str] | None,
    rounds: int | None,
    modes: str | None,
    seeds: str | None,
    runs: Path,
) -> None:
    """Trains the pilot, and prints its table and the advice."""
    config = load_config(file, settings)
    if config.algorithm["name"] in ("fedbe", "fedbe-nokd"):
        raise InputError(
            f"Advice is for algorithms whose modes predict with one model; got "
            f"'{config.algorithm['name']}'."
        )
    if config.algorithm.get("deploy", "ensemble") != "ensemble":
        raise InputError(
            f"Advice is about ensembles, and '{config.algorithm['name']}' predicts with a single "
            "model. Set algorithm.deploy = 'ensemble', or use another algorithm."
        )
    numbers = _integers(modes, "--modes") if modes else CANDIDATES
    seed_list = _integers(seeds, "--seeds") if seeds else (config.seed, config.seed + 1)
    length = pilot_rounds(config, rounds)
    comparison = plan_pilot(config, length, numbers, seed_list)
    with ProgressDisplay(console, runs=len(comparison.rows) * len(seed_list)) as display:
        results = compare(
            comparison,
            runs,
            lambda label, seed: display.callbacks(f"pilot, {label}, seed {seed}"),
            display.finished,
        )
    advice = make_advice(config, results)
    print_table(pilot_table(config, advice, length, len(seed_list)))
    for line in [*explain(config, advice), *caveats(config, length, len(seed_list))]:
        print_line(line)


def pilot_table(config: Config, advice: Advice, pilot: int, seeds: int) -> TextTable:
    """Returns the table of the candidates."""
    metric, title = advice.metric, TITLES[advice.metric]
    rows = []
    for each in advice.candidates:
        expected = NONE
        if each.modes > 1:
            error = None if math.isnan(each.error) else each.error
            expected = show(metric, each.expected, error)
        rows.append(
            (
                "FedAvg" if each.modes == 1 else f"K = {each.modes}",
                f"{each.visits:,.0f}",
                f"{each.clients:.1f}",
                show(metric, each.value),
                NONE if each.modes == 1 else show(metric, each.gain),
                expected,
            )
        )
    header = (
        "method",
        "visits per mode",
        "clients per mode and round",
        f"validation {title} after {pilot} rounds",
        "better than FedAvg by",
        f"expected after {config.rounds} rounds",
    )
    return TextTable(
        f"Pilot: {pilot} of {config.rounds} rounds, {seeds} seed{'s' * (seeds > 1)}, tested on a "
        "part of the training data",
        header,
        tuple(rows),
    )


def explain(config: Config, advice: Advice) -> list[str]:
    """Returns the advice as settings, and the reasons."""
    title = TITLES[advice.metric]
    best = next(each for each in advice.candidates if each.modes == advice.modes)
    average = f"--set average.name={advice.average}"
    lines = [
        f"Advice: --set ensemble.modes={advice.modes} --set ensemble.schedule=balanced {average}"
    ]
    if advice.modes == 1:
        lines.append(
            "No number of modes that was tried is expected to be better than FedAvg after "
            f"{config.rounds} rounds by more than its uncertainty: each of K modes gets only a "
            "K-th of the visits. More rounds, or more clients per round, would change this. "
            "Prediction with one model is also K times cheaper."
        )
    else:
        lines.append(
            f"Each of {best.modes} modes gets {best.visits:,.0f} visits in {config.rounds} rounds, "
            f"after which the ensemble's {title} is expected to be "
            f"{show(advice.metric, best.expected)} lower than FedAvg's. Prediction costs "
            f"{best.modes} models."
        )
        if best.clients < FEW_CLIENTS:
            lines.append(
                f"Only {best.clients:.1f} clients train a mode per round. If clients have "
                "different labels, modes fluctuate: raise ensemble.clients_per_round if you can."
            )
    gain = abs(advice.average_gain)
    lines.append(
        f"In the pilot the moving average of the weights (ema) made the {title} "
        f"{show(advice.metric, gain)} {'lower' if advice.average_gain > 0 else 'higher'}."
    )
    return lines


def caveats(config: Config, pilot: int, seeds: int) -> list[str]:
    """Returns what makes this advice less certain than its numbers say."""
    usual = pilot_rounds(config, None)
    found = []
    if pilot < usual:
        found.append(f"a pilot of {pilot} rounds is short (default: {usual})")
    if seeds == 1:
        found.append("one seed does not show how much the difference varies")
    text = f"Take it with care: {', and '.join(found)}. " if found else ""
    return [
        f"{text}The expected difference is extrapolated, and its ± is over seeds only: confirm it "
        "with 'fedensemble compare'."
    ]


def _integers(text: str, option: str) -> tuple[int, ...]:
    return tuple(int_(part, option) for part in split_names(text))
