"""The table of personal methods: which summary a column shows, and its bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedensemble.experiment.studies.compare import RowResult
from fedensemble.experiment.studies.paper_table import find_paper_table, read_reproduction
from fedensemble.experiment.studies.reproduce import CellResult
from fedensemble.report.figures.client_methods import client_methods, total_bytes

METHODS = (
    "local only",
    "FedAvg",
    "FedAvg + tuning",
    "Ditto",
    "FedRep",
    "IFCA",
    "IFCA, clusters",
    "FedEM",
    "Fed-ensemble, select",
    "Fed-ensemble, mix",
    "Fed-ensemble, tune",
    "best-mode, select",
    "worst-mode, mix",
)


def statistics(accuracy):
    names = ("mean", "std", "p10", "worst_10", "worst")
    return {f"{m}_{n}": accuracy for m in ("accuracy", "nll", "ece") for n in names}


def summary(accuracy, **more):
    return {"bytes_up": 1_000_000, "bytes_down": 2_000_000, "seconds": 6.0, **more} | {
        f"test_{key}": statistics(accuracy + shift)
        for key, shift in (("clients", 0.0), ("own", 0.1), ("new_clients", 0.3), ("head_new", 0.4))
    }


def results(table):
    """One summary per seed; a later seed finds fewer groups, except IFCA from clusters."""
    made = []
    for cell in table.cells:
        summaries = []
        for seed in range(len(cell.configs)):
            values = summary(0.1)
            for key in ("select", "mix", "tune"):
                found = 0.95 if cell.column == "IFCA, clusters" else 1 - 0.25 * seed
                values[f"test_{key}"] = {
                    **statistics(0.5), "bytes_down": 500_000, "recovered": found, "clients": 20
                }  # fmt: skip
                values[f"test_{key}_new"] = statistics(0.6)
            summaries.append(values)
        folders = tuple(Path(f"run-{seed}") for seed in range(len(summaries)))
        runs = RowResult(cell.label, folders, tuple(summaries), ((),) * len(summaries))
        made.append(CellResult(cell, runs))
    return made


def with_accuracies(result, accuracies, spread=0.1):
    """The same cell with one summary per accuracy, of 20 clients."""
    summaries = tuple(
        {
            **summary(0.1),
            "test_mix": {**statistics(accuracy), "accuracy_std": spread, "clients": 20},
        }
        for accuracy in accuracies
    )
    folders = tuple(Path(f"run-{seed}") for seed in range(len(summaries)))
    cell = replace(result.cell, configs=tuple(result.cell.configs[0] for _ in summaries))
    cell = replace(
        cell, configs=tuple(c.model_copy(update={"seed": i}) for i, c in enumerate(cell.configs))
    )
    return CellResult(cell, RowResult(cell.label, folders, summaries, ((),) * len(summaries)))


@pytest.mark.parametrize("scale", ["full", "smoke"])
def test_all_methods_are_there_with_their_own_metrics_and_bytes(scale):
    table = read_reproduction(find_paper_table("personal"), scale)
    rows = list(dict.fromkeys(cell.row for cell in table.cells))
    assert len(rows) == (4 if scale == "full" else 3)
    assert tuple(cell.column for cell in table.cells if cell.row == rows[0]) == METHODS
    assert not any(cell.skipped for cell in table.cells)
    shown = client_methods(table, results(table))
    by_method = {line[1]: line for line in shown.table.rows if line[0] == rows[0]}
    header = shown.table.header
    accuracy, new = (header.index(name) for name in ("accuracy %", "accuracy %, new clients"))
    down, groups = header.index("downloaded, MB"), header.index("groups found %")
    found = {
        m: (line[accuracy].split()[0], line[new].split()[0], line[down])
        for m, line in by_method.items()
    }
    assert found["FedAvg"] == ("10.00", "40.00", "2.0")
    assert found["FedRep"] == ("20.00", "50.00", "2.0")
    assert found["Ditto"] == ("20.00", "40.00", "2.0")
    assert found["Fed-ensemble, mix"] == ("50.00", "60.00", "2.5")
    least = header.index("groups found %, worst seed")
    assert by_method["IFCA"][groups] == "75.0" and by_method["IFCA"][least] == "50.0"
    assert by_method["IFCA, clusters"][least] == "95.0"
    assert by_method["FedAvg"][groups] == by_method["FedAvg"][least] == "–"
    assert (
        f"{rows[0]}: The group of at least 95 % of the clients is found for each of 3 seeds by "
        "IFCA, clusters (at least 95.0 %)." in shown.notes
    )
    numbers = {line[1:3]: line[3:] for line in shown.numbers.rows if line[0] == rows[0]}
    assert numbers["IFCA", "recovered"] == ("0.75", "0.25", "3")
    assert numbers["IFCA", "recovered_least"][0] == "0.5"
    assert f"{rows[0]}: Fed-ensemble, mix is 0.00 points of accuracy ahead of FedEM" in " ".join(
        shown.notes
    )
    assert set(shown.figures) == {"table.png"}


@pytest.mark.parametrize(
    ("mine", "other", "sentence"),
    [
        # t of 2 degrees of freedom: 4.303 * 0.01 / sqrt(3)
        (
            (0.5, 0.6, 0.7),
            (0.51, 0.60, 0.69),
            "0.00 points of accuracy {} FedEM (95 % CI of the difference -2.48 to +2.48, "
            "over 3 seeds), with 3.0 MB against 3.0 MB, 1.00 of its bytes.",
        ),
        # 1.96 * sqrt(2 * 0.1^2 / 19)
        (
            (0.5,),
            (0.4,),
            "10.00 points of accuracy ahead of FedEM (95 % CI of the difference +3.64 to +16.36, "
            "over 20 clients of one seed), with 3.0 MB against 3.0 MB, 1.00 of its bytes.",
        ),
    ],
    ids=["seeds", "one seed"],
)
def test_the_gap_has_an_interval(mine, other, sentence):
    table = read_reproduction(find_paper_table("personal-cifar10"), "smoke")
    accuracies = {"Fed-ensemble, mix": mine, "FedEM": other}
    made = [
        with_accuracies(result, accuracies[result.cell.column])
        for result in results(table)
        if result.cell.column in accuracies
    ]
    [note] = [note for note in client_methods(table, made).notes if "FedEM" in note]
    ends = [sentence.format(word) for word in ("ahead of", "behind")]
    assert any(note.endswith(f"Fed-ensemble, mix is {end}") for end in ends), note


def test_runs_of_one_training_are_the_same_run():
    """The rows of Fed-ensemble, and FedAvg with and without tuning, are trained once."""
    table = read_reproduction(find_paper_table("personal-cifar10"), "full")
    hashes = {}
    for cell in table.cells:
        hashes.setdefault(cell.configs[0].hash(), []).append(cell.column)
    together = sorted(columns for columns in hashes.values() if len(columns) > 1)
    assert together == [
        ["Fed-ensemble, select", "Fed-ensemble, mix", "Fed-ensemble, tune"],
        ["Fed-ensemble, select", "Fed-ensemble, mix", "Fed-ensemble, tune"],
        ["FedAvg", "FedAvg + tuning"],
        ["FedAvg", "FedAvg + tuning"],
    ]
    cell = table.cells[0]
    runs = RowResult(cell.label, (Path("run"),), (summary(0.1),), ((),))
    assert total_bytes(CellResult(cell, runs)) == (1_000_000, 2_000_000)
