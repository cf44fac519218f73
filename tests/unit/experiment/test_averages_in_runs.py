"""Runs with an average: records, files, tables, predictions, resuming and batches."""

import json

import pytest
import torch

from fedensemble import SWA, StoreError, load_ensemble
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.config.build import build_data, build_federation, resolve_device
from fedensemble.config.schema import resolve
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies.compare import RowResult
from fedensemble.experiment.studies.multi_run import Task, run_all
from fedensemble.report.html.page import run_page
from fedensemble.report.html.run_data import read_run
from fedensemble.report.html.summary_sections import results
from fedensemble.report.tables.result_table import comparison_table, run_table
from fedensemble.report.tables.runs_table import numbers_of

EXACT = {"rtol": 0, "atol": 0}
AVERAGES = (
    {"name": "ema", "decay": 0.5},
    {"name": "swa", "start": 1},
    {"name": "snapshots", "count": 3},
    {"name": "swag", "start": 0, "rank": 2, "samples": 4},
)
EACH = pytest.mark.parametrize("average", AVERAGES, ids=lambda table: table["name"])


def config(average=None, **tables):
    values = {
        "rounds": 4,
        "data": {"source": "digits", "clients": 8},
        "model": {"name": "resnet20", "width": 2},
        "algorithm": {"name": "fedavg", "lr": 0.1},
        "ensemble": {"modes": 2, "clients_per_round": 4},
        "training": {"steps": 1, "batch_size": 8},
        "evaluation": {"every": 2},
        "engine": {"name": "loop", "device": "cpu", "dtype": "float64"},
        **tables,
    }
    values |= {} if average is None else {"average": average}
    return resolve_device(resolve(values, "test"))


@EACH
def test_a_run_is_tested_and_saved_with_its_average(average, tmp_path):
    own, plain = config(average), config()
    summary, without = run(own, tmp_path / "own"), run(plain, tmp_path / "plain")
    # The last modes are those of a run without average, to the bit.
    assert summary["test_last"] == without["test"] != summary["test"]
    assert "test_last" not in without
    records = RunFolder(tmp_path / "own").metrics()
    assert [("test" in r, "test_last" in r) for r in records] == [(False, False), (True, True)] * 2
    made = build_federation(own, build_data(own))
    list(made.rounds(4))
    x = build_data(own).x_test[:30]
    loaded = load_ensemble(tmp_path / "own")
    expected = made.ensemble
    assert made.model.buffer_layout.total > 0
    torch.testing.assert_close(loaded.predict(x).members, expected.predict(x).members, **EXACT)
    assert loaded.prediction_models == expected.prediction_models == summary["prediction_models"]
    assert loaded.prediction_bytes == expected.prediction_bytes == summary["prediction_bytes"]
    for mode in range(2):
        found, wanted = loaded.module(mode).state_dict(), expected.module(mode).state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    # a module of each predictor gives that predictor's prediction
    count = loaded.prediction_models // 2
    inputs = made.data.inputs(x, torch.float64)
    with torch.no_grad():
        outputs = [loaded.module(1, s).double()(inputs).softmax(-1) for s in range(count)]
    members = loaded.predict(x).members[count:]
    torch.testing.assert_close(torch.stack(outputs), members, rtol=0, atol=1e-12)


def test_tables_and_pages_show_both_tests(tmp_path):
    stores = []
    for name, average in (("snapshots", {"name": "snapshots"}), ("plain", None)):
        run(config(average, model={"name": "mlp", "hidden": [4]}), tmp_path / name)
        stores.append(RunFolder(tmp_path / name))
    own = stores[0].summary()
    table = run_table(own, stores[0].metrics())
    assert table.header[:3] == ("metric", "standard evaluation", "last modes, without average")
    shown = dict(zip(table.header, table.rows[0], strict=True))
    assert shown["last modes, without average"] == f"{100 * own['test_last']['accuracy']:.2f}"
    models = next(row for row in table.rows if row[0] == "prediction models")
    assert models[1:3] == (str(own["prediction_models"]), "–")
    assert results(read_run(stores[0].path)).tables[0].header == table.header
    assert numbers_of(own)["last_accuracy"] == own["test_last"]["accuracy"]
    # the page names the average, and has the curve of the current modes only with one
    with_average, without = (run_page(store.path) for store in stores)
    assert "average\N{NO-BREAK SPACE}snapshots" in with_average and "without average" not in without
    assert with_average.count("ensemble without average") >= 2
    rows = [
        RowResult(store.path.name, (store.path,), (store.summary(),), (store.metrics(),))
        for store in stores
    ]
    compared = comparison_table(rows, "accuracy")
    column = compared.header.index("accuracy %, last modes")
    last = f"{100 * own['test_last']['accuracy']:.2f}"
    assert [row[column] for row in compared.rows] == [last, "–"]
    assert compared.header.index("prediction models, MB") > column  # 8 models instead of 2
    assert "last modes: the current modes, without the average" in compared.title
    plain = comparison_table(rows[1:], "accuracy")
    assert "accuracy %, last modes" not in plain.header and "last modes" not in plain.title


@EACH
def test_runs_in_one_batch_have_their_own_averages(average, tmp_path):
    small = {"model": {"name": "mlp", "hidden": [4]}, "engine": {"dtype": "float64"}}
    configs = [
        config(average, **small),
        config(None, seed=1, **small),
        config({"name": "ema"}, seed=2, **small),
        config(
            average, seed=3, **{**small, "algorithm": {"name": "fedavg", "lr": 0.2, "lr_cycle": 2}}
        ),
    ]
    folders = [tmp_path / f"batched{index}" for index in range(4)]
    tasks = [Task(c, f, RunCallbacks()) for c, f in zip(configs, folders, strict=True)]
    assert all(summary["trained_together"] == 4 for summary in run_all(tasks))
    for index, (one, folder) in enumerate(zip(configs, folders, strict=True)):
        run(one, tmp_path / f"alone{index}")
        alone, _ = read_checkpoint(tmp_path / f"alone{index}" / "modes.safetensors")
        batched, _ = read_checkpoint(folder / "modes.safetensors")
        assert set(alone) == set(batched)
        for name, value in alone.items():
            torch.testing.assert_close(batched[name], value, rtol=0, atol=1e-11)


def test_another_average_is_named(tmp_path):
    swa = config({"name": "swa", "start": 0})
    run(swa, tmp_path / "run")
    with pytest.raises(StoreError, match=r"other settings \(average.decay, average.every"):
        run(config({"name": "ema"}), tmp_path / "run")
    data = build_data(swa)
    trained, other, plain = (
        build_federation(each, data) for each in (swa, config({"name": "ema"}), config())
    )
    list(trained.rounds(2))
    for federation in (other, plain):
        before = federation.state
        with pytest.raises(StoreError, match=r"written with another average.*mean_buffers"):
            federation.restore(trained.tensors(), 2)
        assert federation.state is before
    with pytest.raises(StoreError, match="with the state none; the state of this one is"):
        trained.restore(plain.tensors(), 0)


def test_load_may_start_another_average(tmp_path):
    settings = config({"name": "swa", "start": 0})
    data = build_data(settings)
    made = build_federation(settings, data)
    list(made.rounds(2))
    made.save(tmp_path)
    kind, model = type(made), made.model.build
    same = kind.load(tmp_path, model=lambda: model(0), data=data)
    other = kind.load(tmp_path, model=lambda: model(0), data=data, average="ema")
    none = kind.load(tmp_path, model=lambda: model(0), data=data, average="none")
    for each in (same, other, none):
        list(each.rounds(1))
    for each in (other, none):
        assert torch.equal(each.state.modes["theta"], same.state.modes["theta"])
    assert other.state.average["trained_rounds"].max() == 1
    assert torch.equal(other.ensemble.theta, other.state.modes["theta"])
    # of the same kind, with other options: continues
    later = kind.load(tmp_path, model=lambda: model(0), data=data, average=SWA(start=0, every=3))
    assert later.average == SWA(start=0, every=3) and later.state.average["collected"].min() > 0
    assert none.state.average == {} and same.state.average["collected"].max() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1/predictor_buffers"), "only 1 of 2 modes have 'predictor_buffers'"),
        (
            lambda t: [t.pop(f"{mode}/predictors") for mode in (0, 1)],
            "'predictor_buffers' without 'predictors'",
        ),
        (
            lambda t: t.update({"0/predictor_buffers": t["0/predictor_buffers"][:1].clone()}),
            "'0/predictor_buffers' has shape",
        ),
    ],
)
def test_damaged_files_of_modes_are_refused(change, message, tmp_path):
    run(config({"name": "snapshots", "count": 3}), tmp_path / "run")
    file = tmp_path / "run" / "modes.safetensors"
    tensors, facts = read_checkpoint(file)
    assert tensors["0/predictor_buffers"].shape[0] == 3
    tensors = dict(tensors)
    change(tensors)
    names = ("model", "modes", "tokens", "standardise", "class_names", "feature_names")
    write_checkpoint(file, tensors, {name: facts[name] for name in names})
    (tmp_path / "run" / "checksums.json").unlink(missing_ok=True)
    with pytest.raises(StoreError, match=message):
        load_ensemble(tmp_path / "run")


def test_an_average_that_starts_too_late_is_noted(tmp_path):
    said = []
    small = {"model": {"name": "mlp", "hidden": [4]}}
    callbacks = RunCallbacks(on_message=said.append)
    run(config({"name": "swa", "start": 3, "every": 2}, **small), tmp_path / "four", callbacks)
    assert not any("SWA" in note for note in said)
    summary = run(config({"name": "swa"}, **small), tmp_path / "late", callbacks)
    assert any("SWA collects its first model after round 51, and there are 4" in n for n in said)
    assert summary["test"] == summary["test_last"]


def test_records_are_json(tmp_path):
    run(config({"name": "ema"}, model={"name": "mlp", "hidden": [4]}), tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(lines[-1])["test_last"]) == set(json.loads(lines[-1])["test"])
