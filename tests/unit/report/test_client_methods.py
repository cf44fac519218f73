"""The table of personal methods: which summary a column shows, and its bytes."""

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
    "FedEM",
    "Fed-ensemble, select",
    "Fed-ensemble, mix",
    "Fed-ensemble, tune",
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
    made = []
    for cell in table.cells:
        values = summary(0.1)
        for key in ("select", "mix", "tune"):
            values[f"test_{key}"] = {**statistics(0.5), "bytes_down": 500_000, "recovered": 0.75}
            values[f"test_{key}_new"] = statistics(0.6)
        runs = RowResult(cell.label, (Path("run"),), (values,), ((),))
        made.append(CellResult(cell, runs))
    return made


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
    found = {m: (line[accuracy], line[new], line[down]) for m, line in by_method.items()}
    assert found["FedAvg"] == ("10.00", "40.00", "2.0")
    assert found["FedRep"] == ("20.00", "50.00", "2.0")
    assert found["Ditto"] == ("20.00", "40.00", "2.0")
    assert found["Fed-ensemble, mix"] == ("50.00", "60.00", "2.5")
    assert by_method["IFCA"][groups] == "75.0"
    assert by_method["FedAvg"][groups] == "–"
    assert f"{rows[0]}: Fed-ensemble, mix is 0.00 points of accuracy ahead of FedEM" in " ".join(
        shown.notes
    )
    assert set(shown.figures) == {"table.png"}


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
