"""Inputs that would silently give wrong results raise errors that say what to do."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.data.sources.archive import largest_size
from fedensemble.data.sources.npz import read_arrays
from fedensemble.modeling.factory import ModelSpec
from fedensemble.models import models
from fedensemble.text import printable

X, Y = np.ones((4, 3), np.float32), np.array([0, 1, 0, 1])


def data(**options):
    return fe.FederatedData.from_clients([(X, Y)] * 3, **options)


def federation(**arguments):
    return fe.Federation(
        **{"model": lambda: nn.Linear(3, 2), "data": data(), "modes": 2, **arguments}
    )


def test_fractions_in_test_labels_are_rejected():
    fractions = np.array([0.5, 1.5, 0.5, 1.0])
    with pytest.raises(fe.DataError, match=r"Test labels must be integers.*got 0.5 in row 0"):
        federation(data=data(x_test=X, y_test=fractions))
    prediction = federation().ensemble.predict(X)
    with pytest.raises(fe.DataError, match=r"got 0\.5 in row 0"):
        fe.evaluate(prediction, fractions)
    assert fe.evaluate(prediction, Y.astype(float)) == fe.evaluate(prediction, Y)
    with pytest.raises(fe.DataError, match="got -1"):
        fe.evaluate(prediction, [0, 1, -1, 0])


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "mobilenet"])
@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, float("nan"), "0.5"])
def test_dropout_outside_its_range(name, dropout):
    shape = {} if name == "lstm" else {"shape": (1, 16, 16)}
    with pytest.raises(
        fe.InputError, match=f"Model '{name}' needs dropout to be at least 0 and below 1"
    ):
        models[name](**shape, outputs=2, dropout=dropout)


def test_inputs_that_float32_cannot_hold():
    inputs = np.zeros((5, 3))
    inputs[3, 1] = 1e300
    with pytest.raises(
        fe.DataError, match=r"hold 1e\+300 \(first in row 3, column 1\), which float32 cannot hold"
    ):
        federation().ensemble.predict(inputs)
    with pytest.raises(fe.DataError, match=r"Inputs of the test data hold 1e\+300"):
        federation(data=data(x_test=inputs, y_test=[0] * 5))
    with pytest.raises(fe.DataError, match=r"Inputs of the clients' data hold 1e\+300"):
        federation(data=fe.FederatedData.from_clients([(inputs, [0, 1, 0, 1, 0])]))
    exact = federation(dtype=torch.float64).ensemble.predict(inputs)
    assert bool(exact.mean.isfinite().all())


def test_predictions_that_are_not_finite_name_the_mode():
    ensemble = federation().ensemble
    theta = ensemble.theta.clone()
    theta[1] = 3e38
    broken = fe.Ensemble(ensemble.model, theta, ensemble.buffers)
    with pytest.raises(
        fe.DivergedError, match=r"Mode 1 predicts nan or infinity \(first for row 2\)"
    ):
        broken.predict(np.array([[0, 0, 0], [0, 0, 0], [9, 9, 9]], np.float32))


def test_masked_arrays_and_large_integers():
    masked = np.ma.masked_array(X, np.eye(4, 3, dtype=bool))
    for x in (masked, list(masked)):
        with pytest.raises(fe.DataError, match=r"masked array.*x\.filled\(0\)"):
            fe.FederatedData.from_clients([(x, Y)])
    assert len(fe.FederatedData.from_clients([(masked.filled(0), Y)]).x) == 4
    # nothing is hidden
    assert len(fe.FederatedData.from_clients([(np.ma.masked_array(X), Y)]).x) == 4
    with pytest.raises(fe.DataError, match="uint64 contain values of 2\\*\\*63 or more"):
        fe.FederatedData.from_clients([(np.full((4, 3), 2**63, np.uint64), Y)])
    assert fe.FederatedData.from_clients([(X, Y.astype(np.uint64))]).y.tolist() == Y.tolist()


def test_examples_without_values_and_labels_without_classes():
    with pytest.raises(fe.DataError, match=r"have no values: their shape is \(4, 0\)"):
        fe.FederatedData.from_clients([(X[:, :0], Y)])
    with pytest.raises(fe.DataError, match="Labels go up to 4611686018427387904"):
        fe.FederatedData.from_clients([(X, np.array([0, 1, 2**62, 1]))])
    with pytest.raises(fe.InputError, match="needs two classes or more"):
        federation(model=lambda: nn.Linear(3, 1), data=fe.FederatedData.from_clients([(X, Y * 0)]))


def test_names_of_clients():
    with pytest.raises(fe.DataError, match=r"client 1 is not valid Unicode text: 'a\\ud800'"):
        data(names=("a", "a\ud800", "c"))
    assert printable("a\x1b\n\u202eb\ud800|é中") == "a\\x1b\\n\\u202eb\\ud800|é中"


def test_modes_that_do_not_fit_into_memory(monkeypatch):
    from fedensemble.federation import memory_limits

    monkeypatch.setattr(memory_limits, "free_bytes", lambda device: 10**6)
    with pytest.raises(fe.InputError, match=r"100,000 modes of 8 weights take .* lower modes,"):
        federation(modes=100_000)
    with pytest.raises(fe.InputError, match="modes <= 100,000"):
        federation(modes=10**9)
    made = []

    def large(**options):
        made.append(options)
        return nn.Linear(**options)

    large.__module__ = "fedensemble.models.large"
    with pytest.raises(fe.InputError, match="2 modes of 40,000,000,000 weights"):
        federation(model=ModelSpec(large, {"in_features": 3, "out_features": 10**10}))
    assert len(made) == 1  # and that one without memory


def test_the_limit_on_archives_grows_with_the_file(tmp_path: Path, monkeypatch):
    from fedensemble.data.sources import archive

    monkeypatch.setattr(archive, "free_memory", lambda: 10**15)
    file = tmp_path / "x.npz"
    with file.open("wb") as sparse:
        sparse.truncate(10**10)
    assert largest_size(file) == 2 * 10**11
    with file.open("wb") as sparse:
        sparse.truncate(10**6)
    assert largest_size(file) == 2 * 10**9
    np.savez_compressed(file, x=np.zeros((300, 1000)))
    with zipfile.ZipFile(file) as packed:
        assert packed.getinfo("x.npy").file_size > 100 * file.stat().st_size
    assert read_arrays(file, {"x": "x"})["x"].shape == (300, 1000)  # well packed, but small


def forge(path: Path, change) -> None:
    tensors, facts = read_checkpoint(path)
    change(tensors, facts)
    write_checkpoint(path, tensors, facts)


def transpose(name):
    return lambda tensors, facts: tensors.update({name: tensors[name].T.contiguous()})


def put(name, value):
    return lambda tensors, facts: tensors.update({name: torch.full_like(tensors[name], value)})


MODES = {
    "transposed": (transpose("0/layers.1.weight"), r"'0/layers.1.weight' has shape \(3, 8\)"),
    "another type": (
        lambda t, f: t.update({"1/layers.1.bias": t["1/layers.1.bias"].double()}),
        "dtype float64; expected shape",
    ),
    "nan": (put("1/layers.1.bias", float("nan")), "'1/layers.1.bias' holds nan or infinity"),
    "infinity": (put("0/layers.3.bias", float("inf")), "holds nan or infinity"),
    "missing": (lambda t, f: t.pop("0/layers.1.bias"), "it has no tensor '0/layers.1.bias'"),
    "one more": (
        lambda t, f: t.update({"9/x": torch.zeros(1)}),
        "the model has no tensor '9/x'",
    ),
    "more modes": (lambda t, f: f.update(modes=3), "it has no tensor '2/"),
    "a billion modes": (lambda t, f: f.update(modes=10**9), "its number of modes is 1000000000"),
    "huge model": (lambda t, f: f.update(model={"shape": [3], "outputs": 10**12}), "weights take"),
    "no shape": (
        lambda t, f: f.update(model={"shape": "x", "outputs": 2}),
        "its entry 'model' is",
    ),
    "std of 0": (
        lambda t, f: f.update(standardise=[[0.0], [0.0]]),
        "its means and standard deviations",
    ),
}


@pytest.mark.parametrize("case", MODES)
def test_forged_modes(case, tmp_path: Path):
    from fedensemble.config.build import build_data, build_federation
    from fedensemble.config.schema import resolve
    from fedensemble.experiment.storage.ensemble_file import read_ensemble, write_modes

    table = {"source": "gaussians", "n": 24, "n_test": 6, "classes": 2, "features": 3, "clients": 4}
    config = resolve(
        {
            "data": table,
            "model": {"name": "mlp", "hidden": [8]},
            "ensemble": {"modes": 2, "clients_per_round": 2},
            "engine": {"device": "cpu"},
        }
    )
    path = tmp_path / "modes.safetensors"
    write_modes(
        path,
        build_federation(config, build_data(config)).ensemble,
        {"model": {"shape": [3], "outputs": 2}},
    )
    assert len(read_ensemble(path, config, torch.device("cpu"))) == 2
    change, message = MODES[case]
    forge(path, change)
    with pytest.raises(fe.FedEnsembleError, match=message):
        read_ensemble(path, config, torch.device("cpu"))


CHECKPOINTS = {
    "weights of another shape": (
        lambda t, f: t.update({"modes/theta": t["modes/theta"][:, :-1]}),
        "has modes",
    ),
    "weights of another type": (
        lambda t, f: t.update({"modes/theta": t["modes/theta"].double()}),
        "float64",
    ),
    "nan": (put("modes/c", float("nan")), "'c' of its modes holds nan"),
    "client states of nan": (
        put("memory/row.c", float("nan")),
        "'row.c' of its client states holds nan",
    ),
    "statistics": (lambda t, f: t.update(buffers=torch.zeros(2, 1)), "has statistics"),
    "no statistics": (lambda t, f: t.pop("buffers"), "no entry 'buffers'"),
    "strata": (put("schedule/stratum", 10**12), "'stratum' of its schedule"),
    "visits": (put("memory/visits", 77), "visits beyond 3 clients and 2 modes"),
    "round": (lambda t, f: f.update(round=-1), "round to be an integer >= 0"),
    "settings": (lambda t, f: f["settings"].update(rate=1), r"unknown settings \['rate'\]"),
    "algorithm": (
        lambda t, f: f["settings"]["algorithm"].update(rate=1),
        "its algorithm cannot be made",
    ),
    "dtype": (lambda t, f: f["settings"].update(dtype="nn"), "its dtype"),
    "no description": (lambda t, f: f.clear(), "its metadata lacks 'round'"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_forged_federations(case, tmp_path: Path):
    made = federation(algorithm=fe.Scaffold(), clients_per_round=3, strata=2)
    list(made.rounds(2))
    (path,) = (made.save(tmp_path) / "checkpoint").iterdir()
    arguments = {"model": lambda: nn.Linear(3, 2), "data": data()}
    assert fe.Federation.load(tmp_path, **arguments).round == 2
    change, message = CHECKPOINTS[case]
    forge(path, change)
    with pytest.raises(fe.FedEnsembleError, match=message):
        fe.Federation.load(tmp_path, **arguments)


def test_a_checkpoint_without_entries_that_were_added_later(tmp_path: Path):
    made = federation(algorithm=fe.Scaffold(), clients_per_round=3, strata=2)
    list(made.rounds(2))
    (path,) = (made.save(tmp_path) / "checkpoint").iterdir()
    forge(path, lambda tensors, facts: (tensors.pop("memory/row.c"), tensors.pop("schedule/seed")))
    loaded = fe.Federation.load(tmp_path, model=lambda: nn.Linear(3, 2), data=data())
    rows = loaded.tensors()["memory/row.c"]
    assert len(rows) == len(made.tensors()["memory/row.c"]) > 0 and not bool(
        rows.any()
    )  # as for clients that never trained the mode
    assert int(loaded.state.schedule["seed"]) == 0


def test_a_rejected_checkpoint_does_not_change_the_federation():
    made = federation()
    tensors = {name: tensor.clone() for name, tensor in made.tensors().items()}
    before = made.state
    with pytest.raises(fe.StoreError):
        made.restore({**tensors, "schedule/stratum": torch.tensor([5, 5, 5])}, 1)
    assert made.state is before and next(made.rounds(1)).round == 1
