"""Aggregators and attacks in training: equal on every engine, modes apart from each other, exact on
resume.
"""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.core.aggregator import aggregate
from fedensemble.core.types import GatheredUploads
from fedensemble.errors import AggregatorWarning, InputError
from fedensemble.experiment.studies.run_groups import Groups
from fedensemble.robust import LabelFlip, Mean, Median, SignFlip
from fedensemble.testing.toy_problems import (
    SIZES,
    classification,
    small_federation,
    small_model,
    train,
)

CLOSE = 1e-10
RULES = [name for name in fe.aggregators if name != "mean"]


def crowded(algorithm="fedavg", engine="vector", modes=2, model=small_model, data=None, **options):
    """All six clients in every round, three to a mode."""
    return fe.Federation(
        model,
        data or classification(),
        algorithm,
        engine=engine,
        batch_size=3,
        dtype=torch.float64,
        seed=5,
        epochs=2,
        schedule=fe.Stratified(modes=modes, strata=modes, clients_per_round=6),
        **options,
    )


def normed():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def equal(one, other, close=CLOSE):
    for name, value in one.state.modes.items():
        torch.testing.assert_close(other.state.modes[name], value, rtol=0, atol=close)
    torch.testing.assert_close(other.state.buffers, one.state.buffers, rtol=0, atol=close)


@pytest.mark.parametrize("attack", [None, *fe.attacks])
@pytest.mark.parametrize("aggregator", list(fe.aggregators))
def test_both_engines_agree(aggregator, attack):
    chosen = attack and fe.attacks[attack](share=0.34)
    loop, vector = (
        crowded("fedavg", engine, aggregator=aggregator, attack=chosen)
        for engine in ("loop", "vector")
    )
    equal(train(loop, 3), train(vector, 3))


@pytest.mark.parametrize("aggregator", RULES)
def test_both_engines_agree_on_running_statistics_and_in_small_blocks(aggregator):
    one, other = (
        crowded(
            "fedadam",
            engine,
            model=normed,
            last_batch="wrap",
            aggregator=aggregator,
            attack=SignFlip(share=0.2),
            **options,
        )
        for engine, options in (("loop", {}), ("vector", {"engine_options": {"block": 2}}))
    )
    before = one.state.buffers
    equal(train(one, 3), train(other, 3))
    assert not torch.equal(one.state.buffers, before)


def test_the_mean_gathers_nothing_and_is_what_it_was():
    plain, named = crowded("fedavg"), crowded("fedavg", aggregator=Mean())
    assert not named.algorithm.gathers
    assert named.engine.run_visits(*named.next_request()).cohort.members is None
    train(plain, 2), train(named, 2)
    assert all(
        torch.equal(plain.state.modes[name], named.state.modes[name]) for name in plain.state.modes
    )


def test_the_mean_of_gathered_uploads_is_the_mean():
    federation = crowded("fedac", aggregator="median", model=normed, last_batch="wrap")
    request = federation.next_request()
    returned = federation.engine.run_visits(*request)
    again = aggregate(Mean(), request.algorithm, request.sent, request.buffers, returned)
    for name, value in returned.uploads.items():
        torch.testing.assert_close(again.uploads[name], value, rtol=0, atol=CLOSE)
    torch.testing.assert_close(again.buffers, returned.buffers, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("aggregator", RULES)
@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedac"]
)
def test_one_mode_does_not_see_the_other(aggregator, method):
    """Whatever mode 1's clients send, mode 0 stays the same to the bit."""
    results = []
    for lie in (0.0, 1e6):
        federation = crowded(method, aggregator=aggregator)
        request = federation.next_request()
        returned = federation.engine.run_visits(*request)
        members = returned.cohort.members
        bent = {
            name: value + lie * (members.mode == 1).unsqueeze(1)
            for name, value in members.uploads.items()
        }
        federation.run_round(with_members(returned, members._replace(uploads=bent)))
        results.append(federation.state.modes["theta"])
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])


def with_members(returned, members: GatheredUploads):
    return returned._replace(cohort=replace(returned.cohort, members=members))


@pytest.mark.parametrize("aggregator", RULES)
def test_one_liar_of_three_does_not_take_a_mode_away(aggregator):
    """The mean follows a liar by a million; no robust aggregator leaves what honest clients
    reach.
    """
    moved = {}
    for rule in ("mean", aggregator):
        federation = crowded("fedavg", aggregator=rule, attack=SignFlip(share=1 / 6, factor=1e6))
        start = federation.state.modes["theta"]
        train(federation, 1)
        moved[rule] = float((federation.state.modes["theta"] - start).norm(dim=1).max())
    assert moved["mean"] > 1e3 and moved[aggregator] < 5


def test_malicious_clients_alone_are_changed_and_labels_are_flipped():
    honest, flipped = crowded("fedavg"), crowded("fedavg", attack=LabelFlip(share=0.34))
    bad = flipped.malicious
    assert int(bad.sum()) == 2 and not flipped.algorithm.gathers
    for client in range(len(SIZES)):
        expected, found = (
            honest.engine.data.client(client)[1],
            flipped.engine.data.client(client)[1],
        )
        assert torch.equal(found, 2 - expected if bad[client] else expected)
    assert torch.equal(flipped.data.y, honest.data.y)  # whose data it is has not changed
    for name in ("sign-flip", "noise", "alie"):
        attacked = crowded("fedavg", attack=fe.attacks[name](share=0.34))
        assert torch.equal(attacked.malicious, bad)


@dataclass(frozen=True, kw_only=True)
class Keeps(fe.Attack):
    """Sends what was trained."""

    def forge(self, own, honest, key):
        return own


@pytest.mark.parametrize("method", list(fe.algorithms))
def test_an_attack_that_changes_nothing_changes_nothing(method):
    """For every method: uploads are taken apart into changes and put together again."""
    if fe.algorithms[method].joint:
        with pytest.raises(fe.InputError, match=r"Leave attack out, or use 'label-flip'"):
            small_federation(fe.algorithms[method](), "vector", 2, 2, attack=Keeps(share=0.5))
        return
    plain = small_federation(fe.algorithms[method](), "vector", 2, 2)
    attacked = small_federation(fe.algorithms[method](), "vector", 2, 2, attack=Keeps(share=0.5))
    equal(train(plain, 2), train(attacked, 2), close=1e-8)


def test_runs_together_are_what_they_are_apart():
    data = classification()  # one for all: only the labels of malicious clients differ

    def runs():
        return [
            crowded(data=data),
            crowded(data=data, aggregator="krum", attack="noise"),
            crowded(data=data, attack=LabelFlip(share=0.34)),
            crowded(data=data, aggregator="trimmed-mean"),
        ]

    together, apart, groups = runs(), runs(), Groups()
    for _ in range(3):
        groups.advance(dict(enumerate(together)))
    assert len(groups._groups[0, 1, 2, 3]) == 1  # one program
    for one, other in zip(apart, together, strict=True):
        equal(train(one, 3), other)


@pytest.mark.parametrize(
    "aggregator", [Median(), fe.Krum(malicious=0.3), fe.CenteredClipping(tau=0.5)]
)
@pytest.mark.parametrize("attack", [None, fe.attacks["noise"](share=0.34), LabelFlip(share=0.34)])
def test_a_saved_federation_goes_on_to_the_bit(tmp_path, aggregator, attack):
    whole, first = (crowded("fedavg", aggregator=aggregator, attack=attack) for _ in range(2))
    train(whole, 4)
    train(first, 2).save(tmp_path)
    again = fe.Federation.load(tmp_path, model=small_model, data=classification())
    assert (again.aggregator, again.attack) == (aggregator, attack)
    train(again, 2)
    equal(whole, again, close=0)


def test_a_federation_saved_before_there_were_aggregators_loads(tmp_path):
    (file,) = (crowded("fedavg").save(tmp_path) / "checkpoint").iterdir()
    tensors, facts = read_checkpoint(file)
    del facts["settings"]["aggregator"], facts["settings"]["attack"]
    write_checkpoint(file, tensors, facts)
    again = fe.Federation.load(tmp_path, model=small_model, data=classification())
    assert (again.aggregator, again.attack) == (Mean(), None)


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "diana", "dore", "fedsplit", "fedpd"])
def test_methods_that_track_a_mean_take_no_other_aggregator(method):
    with pytest.raises(
        InputError,
        match=f"'median' cannot be used with algorithm '{method}'.*Use aggregator 'mean'",
    ):
        crowded(method, aggregator="median")
    train(crowded(method, aggregator="mean", attack="ipm"), 1)


@pytest.mark.parametrize("method", ["fedbe", "pfnm"])
def test_methods_that_gather_take_no_other_aggregator(method):
    with pytest.raises(InputError, match="in its own way"):
        crowded(method, aggregator="krum")


def test_a_median_of_sparse_uploads_is_refused():
    with pytest.raises(InputError, match="most coordinates of a compressed upload are zero"):
        crowded("qsgd", aggregator="trimmed-mean")
    train(crowded("qsgd", aggregator="geometric-median"), 1)


def test_too_few_clients_in_a_mode_are_said():
    with pytest.warns(
        AggregatorWarning, match="About 2 clients train a mode per round.*'krum' protects little"
    ):
        small_federation(fe.FedAvg(), "loop", 2, 2, aggregator="krum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_federation(fe.FedAvg(), "loop", 1, 1, aggregator="krum")
        small_federation(fe.FedAvg(), "loop", 2, 2)


@pytest.mark.filterwarnings("ignore::fedensemble.errors.AggregatorWarning")
@pytest.mark.parametrize("aggregator", RULES)
def test_modes_with_one_or_two_clients_and_with_none_train(aggregator):
    federation = fe.Federation(
        small_model,
        classification(),
        "fedavg",
        modes=3,
        strata=2,
        clients_per_round=3,
        batch_size=3,
        dtype=torch.float64,
        aggregator=aggregator,
    )
    train(federation, 6)
    assert bool(torch.isfinite(federation.state.modes["theta"]).all())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fe.TrimmedMean(trim=0.5), "0 <= trim < 0.5; got trim=0.5"),
        (lambda: fe.Krum(malicious=-0.1), "malicious"),
        (lambda: fe.GeometricMedian(iterations=0), "iterations >= 1"),
        (lambda: fe.CenteredClipping(tau=0.0), "tau > 0"),
        (lambda: SignFlip(share=1.5), "0 <= share <= 1"),
        (lambda: fe.attacks["ipm"](epsilon=float("nan")), "epsilon"),
        (lambda: crowded(aggregator="medain"), "did you mean 'median'"),
        (lambda: crowded(aggregator=Median), "the class Median; write Median"),
        (lambda: crowded(attack=3), "attack must be one such as"),
        (lambda: LabelFlip().labels(torch.zeros(2), None), "needs classification"),
    ],
)
def test_what_cannot_be_is_said(make, words):
    with pytest.raises(InputError, match=words):
        make()
