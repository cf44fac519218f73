"""The rows of `fedensemble ls runs` distinguish runs from one another."""

import json
from pathlib import Path

from fedensemble.catalog.listing import listing, listing_table
from fedensemble.config.schema import resolve
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.report.tables.run_row import run_record


def made(folder: Path, accuracies: list[float], **changes: dict) -> RunFolder:
    folder.mkdir(parents=True)
    values = {
        "name": "r",
        "rounds": 9,
        "data": {"clients": 20},
        "engine": {"device": "cpu"},
        **changes,
    }
    (folder / "config.toml").write_text(resolve(values).toml())
    records = [
        {"round": at + 1, "test": {"accuracy": value}} for at, value in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return RunFolder(folder)


def test_data_model_and_rate_are_told(tmp_path: Path) -> None:
    plain = run_record(made(tmp_path / "a", [0.5, 0.25]))
    divided = {"clients": 20, "partition": "dirichlet", "alpha": 0.07}
    other = run_record(
        made(
            tmp_path / "b",
            [],
            data=divided,
            model={"name": "mlp", "hidden": [5]},
            algorithm={"name": "fedprox", "lr": 0.07},
        )
    )
    assert plain["data"] == "digits, iid, 20 clients"
    assert other["data"] == "digits, dirichlet alpha=0.07, 20 clients"
    assert plain["model"].split()[0] == "mlp" and other["model"] == "mlp hidden=[5]"
    assert (other["algorithm"], other["lr"], other["modes"]) == ("fedprox", 0.07, plain["modes"])
    assert (plain["rounds"], plain["state"], plain["result"]) == (
        "2/9",
        "unfinished",
        "accuracy 25.00",
    )
    assert (other["rounds"], other["result"]) == ("0/9", "")


def test_a_damaged_run_is_listed_with_the_others(tmp_path: Path) -> None:
    made(tmp_path / "a", [0.5])
    (made(tmp_path / "b", []).path / "config.toml").write_text("x = [")
    table = listing_table("runs", listing("runs", tmp_path))
    assert len(table.rows) == 2 and "damaged" in table.rows[1]
    assert {"data", "model", "algorithm", "lr", "modes", "rounds", "result"} <= set(table.header)
