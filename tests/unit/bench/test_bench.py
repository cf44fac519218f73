"""Benchmarks run, print one table each, and measure what they say."""

import json
import time

import pytest
from torch import nn

from fedensemble.bench import cli, model_speed, scaling, throughput
from fedensemble.bench.timing import LiveTable, PeakMemory, fastest, machine, resident_bytes
from fedensemble.errors import InputError


@pytest.fixture
def said():
    return []


def test_engines(monkeypatch, tmp_path, said):
    monkeypatch.setitem(throughput.CASES, "tiny", throughput.Case("mlp", 3, 4, 2, "digits"))
    table = throughput.run(["tiny"], seconds=0.0, out=tmp_path / "out.json", say=said.append)
    ways = [row[1] for row in table.rows]
    assert ways == ["plain torch loop", "engine loop", "engine vector"]
    assert table.rows[0][3] == "1.0"
    assert all(float(row[2].replace(",", "")) > 0 for row in table.rows)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["tables"][0]["rows"] == [list(row) for row in table.rows]
    assert "torch" in told["machine"]
    assert said[-1] == f"| {' | '.join(table.rows[-1])} |"


def test_every_case_that_is_promised_is_there():
    promised = {f"cnn-{n}" for n in (10, 100, 1000)} | {
        "lstm-50",
        "cnn-10-of-100",
        *throughput.QUICK["cpu"],
    }
    promised |= {f"resnet18-{n}-{batch}" for n in (10, 30, 60) for batch in (16, 50)}
    assert promised <= set(throughput.CASES)


@pytest.mark.parametrize("case", ["lstm-50", "resnet18-10-16", "resnet20-group-60-16"])
def test_cases_are_what_they_say(case):
    wanted = throughput.CASES[case]._replace(examples=2, batch=2)
    federation = throughput.federation(wanted, "loop", "cpu", {}, clients=1)
    assert federation.data.x.shape == (2, *throughput.INPUTS[wanted.input])
    norms = [
        module for module in federation.model.build(0).modules() if isinstance(module, nn.GroupNorm)
    ]
    assert bool(norms) == ("group" in case)


def test_clients_drawn_from_more():
    wanted = throughput.CASES["cnn-10-of-100"]
    assert (wanted.clients, wanted.examples, wanted.batch, wanted.population) == (10, 600, 32, 100)
    federation = throughput.federation(wanted._replace(examples=2, batch=2), "vector", "cpu", {})
    assert len(federation.data) == 100
    assert len(next(federation.rounds(1)).plan.client) == 10


def test_growth(said, tmp_path):
    tables = scaling.run((), scale=100, out=tmp_path / "out.json", say=said.append)
    assert len(tables) == len(scaling.PARTS)
    clients = tables[0]
    assert [row[0] for row in clients.rows] == [
        "2 clients",
        "20 clients",
        "200 clients",
        "2,000 clients",
    ]
    assert clients.rows[0][2] == "1.00"
    assert [row[0] for row in tables[1].rows] == ["1 mode"]
    assert len(json.loads((tmp_path / "out.json").read_text())["tables"]) == len(tables)


def test_quick_runs_all_by_name(monkeypatch, said, tmp_path):
    called = []
    for name in cli.BENCHMARKS:
        monkeypatch.setitem(
            cli.BENCHMARKS,
            name,
            lambda *given, name=name: called.append((name, given[0], given[3])),
        )
    cli.bench(None, "cpu", 1.0, False, tmp_path / "new", said.append)
    assert called == [
        (name, "cpu", tmp_path / "new" / f"{name}.json") for name in ("engines", "growth")
    ]
    with pytest.raises(InputError, match="unknown benchmark 'engine': did you mean 'engines'"):
        cli.bench("engine", "cpu", 1.0, False, None, said.append)


SMALL = model_speed.Size(clients=2, batch=2)


@pytest.mark.parametrize("name", model_speed.CASES)
def test_networks_are_batched_layer_by_layer(name):
    """Without notes: a network that fell back to `vmap` would be measured as something else."""
    made = model_speed.federation(model_speed.CASES[name], SMALL, "cpu")
    assert made.engine.stacked and not made.engine.notes


def test_models(tmp_path, said, monkeypatch):
    monkeypatch.setattr(model_speed, "_BATCHES", 1)
    cli.bench_models(None, "tabular, autoencoder", 2, 2, "cpu", 0.0, tmp_path / "new", said.append)
    rows = json.loads((tmp_path / "new" / "models.json").read_text())["tables"][0]["rows"]
    ways = ["plain torch loop", "engine vector"]
    assert [(row[0], row[2]) for row in rows] == [
        (name, way) for name in ("tabular", "autoencoder") for way in ways
    ]
    assert [row[1] for row in rows[::2]] == ["152,330", "68,739"]
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)
    assert rows[0][4] == "1.0"


def test_the_plain_loop_trains(monkeypatch):
    """It takes the steps of torch.optim.SGD, from the same start for every client."""
    monkeypatch.setattr(model_speed, "_BATCHES", 1)
    case, built = model_speed.CASES["tabular"], []
    build = lambda: built.append(case.build()) or built[-1]  # noqa: E731
    train = model_speed.plain_loop(case._replace(build=build), SMALL, "cpu")
    before = {name: value.clone() for name, value in built[0].state_dict().items()}
    train()
    changed = [not bool((value == before[n]).all()) for n, value in built[0].state_dict().items()]
    assert all(changed)


def test_names_and_sizes_of_the_benchmark_of_models(monkeypatch, said):
    called = []
    monkeypatch.setattr(model_speed, "run", lambda *given, **more: called.append(given))
    for device, networks in (("cpu", None), ("cuda", "all")):
        cli.bench_models("models", networks, None, None, device, 1.0, None, said.append)
    assert called == [
        ([], "cpu", 1.0, model_speed.Size(4, 16)),
        (list(model_speed.CASES), "cuda", 1.0, model_speed.Size(50, 16)),
    ]
    with pytest.raises(InputError, match="belongs to benchmark 'models'; got 'engines'"):
        cli.bench_models("engines", "vit", None, None, "cpu", 1.0, None, said.append)
    monkeypatch.undo()
    with pytest.raises(InputError, match="unknown network 'vitt': did you mean 'vit'"):
        cli.bench_models(None, "vitt", None, None, "cpu", 1.0, None, said.append)


def test_unknown_names():
    with pytest.raises(InputError, match="unknown case 'cnn-11'"):
        throughput.run(["cnn-11"])
    with pytest.raises(InputError, match="unknown part 'client'"):
        scaling.run(["client"])


def test_the_fastest_call_counts_and_ways_take_turns():
    order = []

    def way(name, pauses):
        def call():
            order.append(name)
            time.sleep(next(pauses))

        return call

    slow, quickly = iter([0.0, 0.03, 0.05]), iter([0.0, 0.01, 0.0])
    best = fastest({"a": way("a", slow), "b": way("b", quickly)}, "cpu", 0.0)
    assert order == ["a", "b"] * 3
    assert 0.03 <= best["a"] < 0.05 + 0.03
    assert best["b"] < best["a"]


def test_peak_memory_is_that_beyond_the_start():
    peak = PeakMemory("cpu")
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    del held
    assert peak() > 48 << 20
    assert resident_bytes() > 0


def test_machine_and_table(said):
    assert "fedensemble" in machine("cpu")
    table = LiveTable("Title", ("a", "b"), said.append)
    table.add("x", 1)
    assert said == ["\nTitle\n", "| a | b |", "| --- | ---: |", "| x | 1 |"]
