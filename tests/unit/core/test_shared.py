"""Which parameters are shared, what cannot share them, and that they are equal in all modes."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedensemble import Balanced, FederatedData, Federation, Stratified
from fedensemble.algorithms import FedAvg, FedAvgM, Scaffold
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.config.toml import with_settings
from fedensemble.core.algorithm import algorithms
from fedensemble.core.parameters.shared import Shared
from fedensemble.core.parameters.shared_checks import check_server_update, check_sharing
from fedensemble.errors import InputError
from fedensemble.flat_params import Layout
from fedensemble.testing.toy_problems import classification, small_federation, train

SHARING = {
    "anchored",
    "fedavg",
    "fedprox",
    "fedavgm",
    "fedadagrad",
    "fedadam",
    "fedyogi",
    "fedac",
    "qsgd",
    "ditto",
}


def with_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


NAMES = [name for name, _ in with_norm().named_parameters()]


def federation(algorithm="fedavg", model=with_norm, **options):
    """Two strata for three modes: in every round a mode is idle."""
    options = {
        "schedule": Stratified(modes=3, strata=2, clients_per_round=4),
        "dtype": torch.float64,
        "batch_size": 3,
        "engine": "loop",
        **options,
    }
    return Federation(model, classification(), algorithm, **options)


def layout(names):
    return Layout.of({name: torch.zeros(2) for name in names})


def shared_names(patterns, parameters, buffers=()):
    found = Shared.of(patterns, layout(parameters), layout(buffers))
    pairs = [*zip(parameters, found.parameters[::2], strict=True)]
    pairs += zip(buffers, found.buffers[::2], strict=True)
    return {name for name, is_shared in pairs if is_shared}


def test_patterns():
    parameters, statistics = ["a.weight", "a.bias", "b.weight", "w"], ["a.mean", "b.mean", "c.mean"]
    assert shared_names(["*.bias"], parameters) == {"a.bias"}
    assert shared_names(["A.*", "w"], [*parameters, "A.w"]) == {"A.w", "w"}
    assert shared_names(["[ab].weight"], parameters) == {"a.weight", "b.weight"}
    # Statistics follow the parameters of their module, if all of these are shared.
    assert shared_names(["*.weight"], parameters, statistics) == {
        "a.weight",
        "b.weight",
        "b.mean",
    }
    assert shared_names(["c.*"], parameters, statistics) == {"c.mean"}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("0.*", r"shared is a list of patterns; got '0\.\*'\. Write \['0\.\*'\]"),
        (
            [3],
            r"shared is a list of patterns of parameter names, such as \['body\.\*'\]; got \[3\]",
        ),
        ([""], r"such as \['body\.\*'\]"),
        (3, "such as"),
        (["0.*", "1"], r"no parameter matches '1'\. .* 0\.weight, .*Did you mean '1\.\*'\?"),
        (["bias"], r"no parameter matches 'bias'.*Did you mean '\*bias\*'\?"),
        (["encoder.*"], r"no parameter matches 'encoder\.\*'\. The model has 0\.weight.*with \*"),
        (["*x*" * 500], "no parameter matches"),
    ],
)
@pytest.mark.parametrize("modes", [1, 3])
def test_wrong_patterns(patterns, message, modes):
    schedule = Stratified(modes=modes, strata=1, clients_per_round=4)
    with pytest.raises(InputError, match=message) as error:
        federation(shared=patterns, schedule=schedule)
    assert len(str(error.value)) < 900


def test_a_message_lists_some_of_many_names():
    with pytest.raises(InputError, match=r"9\.w, .* and 88 more\. Did you mean '17\.\*'"):
        Shared.of(["17"], layout([f"{n}.w" for n in range(100)]), layout([]))


@pytest.mark.parametrize("name", sorted(algorithms))
def test_which_algorithms_share(name):
    schedule, theta = Balanced(modes=3), torch.zeros(7)
    table = {"algorithm": {"name": name}, "data": {"source": "digits", "clients": 20}}
    table["ensemble"] = {"modes": 3, "shared": ["layers.*"]}
    if name in SHARING:
        check_sharing(algorithms[name](), schedule, theta)
        check_server_update(algorithms[name](), theta)
        resolve(table)
        return
    with pytest.raises(InputError, match=f"Algorithm '{name}' cannot be used with shared: its "):
        check_sharing(algorithms[name](), schedule, theta)
    with pytest.raises(InputError, match=r"ensemble\.shared: Algorithm .* share nothing") as error:
        resolve(table)
    assert {word for word in SHARING if word in str(error.value).split("Use ")[1]} == SHARING
    resolve({**table, "ensemble": {"modes": 1, "strata": 1, "shared": ["layers.*"]}})


@dataclass(frozen=True, kw_only=True)
class Normalised(FedAvg):
    """The server's step has length one: every parameter depends on all others."""

    def server_update(self, mode, uploads, cohort):
        change = uploads["theta"] - mode["theta"]
        return {"theta": mode["theta"] + change / change.norm(dim=-1, keepdim=True)}


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """The server counts the rounds of each mode."""

    def init_mode(self, theta):
        return {"theta": theta, "count": torch.zeros_like(theta[..., :1])}

    def server_update(self, mode, uploads, cohort):
        return {**uploads, "count": mode["count"] + 1}


@dataclass(frozen=True, kw_only=True)
class Reporting(FedAvg):
    """Clients also upload one value for the whole mode."""

    def local_training(self, sent, memory, problem):
        uploads, memory = super().local_training(sent, memory, problem)
        return {**uploads, "length": uploads["theta"].norm(dim=-1, keepdim=True)}, memory


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Normalised(), "Normalised .* server_update of 'theta' depends on the values of other"),
        (Counting(), "'Counting' .* its server keeps 'count' of 1 values for each whole mode"),
        (Reporting(), "'Reporting' .* its clients upload 'length' of 1 values for a whole mode"),
        (Scaffold(), "'scaffold' .* its clients keep a state for each mode"),
        ("fedbe-nokd", "'fedbe-nokd' .* its server combines the clients' whole models"),
    ],
)
def test_algorithms_that_cannot_share(algorithm, message):
    with pytest.raises(InputError, match=message):
        federation(algorithm, shared=["0.*"])
    federation(algorithm)


@pytest.mark.parametrize("name", ["independent", "independent-kfold"])
def test_modes_that_are_trained_apart_share_nothing(name):
    options = {"schedule": name, "clients_per_round": 4}
    with pytest.raises(InputError, match=f"Schedule '{name}' .*Use schedule 'stratified'"):
        federation(shared=["0.*"], modes=3, **options)
    federation(shared=["0.*"], modes=1, **options)
    table = {"data": {"source": "digits", "clients": 20}}
    table["ensemble"] = {"schedule": name, "shared": ["layers.*"]}
    with pytest.raises(InputError, match=rf"ensemble\.shared: Schedule '{name}'"):
        resolve(table)


@given(
    patterns=st.lists(st.sampled_from([*NAMES, "0.*", "1.*", "*.bias", "3*", "*running_var"])),
    algorithm=st.sampled_from([FedAvg(), FedAvgM(), FedAvg(weighting="uniform")]),
    strata=st.integers(1, 4),
    seed=st.integers(0, 9),
)
@settings(max_examples=15, deadline=None)
def test_shared_entries_are_equal_in_all_modes_after_every_round(patterns, algorithm, strata, seed):
    schedule = Stratified(modes=3, strata=strata, clients_per_round=4)
    made = federation(algorithm, shared=patterns, schedule=schedule, seed=seed)
    plain = federation(algorithm, schedule=schedule, seed=seed)
    layouts = made.model.theta_layout, made.model.buffer_layout
    shared = Shared.of(patterns, *layouts)
    for _ in range(4):
        state = made.state
        for name, value in [*state.modes.items(), ("buffers", state.buffers)]:
            mask = shared.buffers if name == "buffers" else shared.parameters
            assert (value[:, mask] == value[:1, mask]).all()
        others = ~shared.parameters & (plain.state.modes["theta"].std(0) > 0)
        assert (state.modes["theta"].std(0)[others] > 0).all()
        [ours], [theirs] = list(made.rounds(1)), list(plain.rounds(1))
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_sharing_nothing_changes_no_bit(nothing):
    ours, theirs = train(federation(shared=nothing), 4), train(federation(), 4)
    for name, value in theirs.tensors().items():
        assert torch.equal(ours.tensors()[name], value)
    assert ours.ensemble.prediction_bytes == theirs.ensemble.prediction_bytes


def test_one_mode_shares_with_nobody():
    schedule = Stratified(modes=1, strata=1, clients_per_round=4)
    ours, theirs = (
        train(federation(schedule=schedule, shared=shared), 3) for shared in (["0.*"], None)
    )
    assert torch.equal(ours.state.modes["theta"], theirs.state.modes["theta"])


def test_a_device_receives_shared_parameters_once():
    made = train(federation(shared=["0.*", "1.*"]), 2)
    shared, rest = 4 * 5 + 5 + 2 * 5, 5 * 3 + 3
    statistics = made.state.buffers.numel()
    assert made.ensemble.prediction_bytes == 8 * (shared + 3 * rest + statistics)
    assert made.ensemble.prediction_models == 3


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_saved_federation_continues_to_the_same_bits(tmp_path, engine):
    options = {"engine": engine, "shared": ["0.*", "1.*"]}
    whole = train(federation(FedAvgM(), **options), 6)
    train(federation(FedAvgM(), **options), 3).save(tmp_path)
    again = Federation.load(tmp_path, model=with_norm, data=classification())
    assert again.shared == ("0.*", "1.*")
    for name, value in train(again, 3).tensors().items():
        assert torch.equal(whole.tensors()[name], value)
    with pytest.raises(InputError, match="shared cannot change"):
        Federation.load(tmp_path, model=with_norm, data=classification(), shared=[])


def test_engines_agree():
    loop, vector = (
        train(small_federation(FedAvgM(), engine, modes=3, strata=2, shared=["0.*"]), 5)
        for engine in ("loop", "vector")
    )
    for name, value in loop.state.modes.items():
        torch.testing.assert_close(vector.state.modes[name], value, rtol=0, atol=1e-12)


BASE = {
    "data": {"source": "digits", "clients": 20},
    "model": {"name": "mlp", "hidden": [8]},
    "ensemble": {"modes": 3, "clients_per_round": 6},
}


def test_a_config_keeps_its_hash_and_its_patterns():
    plain, empty = resolve(BASE), resolve(with_settings(BASE, ["ensemble.shared=[]"]))
    assert "shared" not in plain.values()["ensemble"]
    assert plain.hash() == empty.hash() and plain.toml() == empty.toml()
    shared = resolve(with_settings(BASE, ['ensemble.shared=["layers.1.*"]']))
    assert shared.hash() != plain.hash()
    assert resolve(shared.values()).hash() == shared.hash()
    federation = build_federation(shared, build_data(shared))
    assert federation.shared == ("layers.1.*",)


@pytest.mark.parametrize("value", ['"body.*"', "[3]", '[""]'])
def test_wrong_patterns_in_a_config(value):
    with pytest.raises(InputError, match=r"ensemble\.shared"):
        resolve(with_settings(BASE, [f"ensemble.shared={value}"]))


def test_an_unmatched_pattern_of_a_config_names_its_key():
    config = resolve(with_settings(BASE, ['ensemble.shared=["encoder.*"]']))
    with pytest.raises(InputError, match=r"ensemble\.shared: no parameter matches 'encoder\.\*'"):
        build_federation(config, build_data(config))


def test_convolution_weights_are_found_in_their_storage_order():
    def model():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))

    data = FederatedData.from_arrays(
        torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.arange(12) % 2,
        [3] * 4,
    )
    made = train(Federation(model, data, modes=2, shared=["0.*"], strata=2), 3)
    first, second = made.ensemble.module(0), made.ensemble.module(1)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[2].weight, second[2].weight)
