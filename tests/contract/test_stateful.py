"""A method with client memory and server state runs on every engine: SCAFFOLD (Karimireddy et al.
2020).
"""

from dataclasses import dataclass

import pytest
import torch

from fedensemble import Algorithm, Federation, Stratified
from fedensemble.testing import check_algorithm
from fedensemble.testing.algorithm import simulation_engines
from fedensemble.testing.toy_problems import classification, small_federation, small_model, train


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm):
    """Steps with g - c_i + c;  c_i+ = c_i - c + (w - w_i) / (tau lr);  c <- c + share mean(c_i+ -
    c_i).
    """

    global_lr: float = 1.0

    def init_mode(self, theta):
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def init_client_state(self, theta):
        return {"c": torch.zeros_like(theta)}

    def broadcast(self, mode):
        return mode

    def local_training(self, sent, memory, problem):
        start, server, own = sent["theta"], sent["c"], memory["c"]
        theta = problem.descend(start, lambda theta, gradient: gradient - own + server)
        new = own - server + (start - theta) / (problem.counts * problem.lr)
        return {"theta": theta - start, "c": new - own}, {"c": new}

    def server_update(self, mode, uploads, cohort):
        theta = mode["theta"] + self.global_lr * uploads["theta"]
        return {"theta": theta, "c": mode["c"] + cohort.share * uploads["c"]}


@pytest.mark.parametrize("engine", simulation_engines())
def test_contract(engine):
    check_algorithm(Scaffold(lr=0.1), engine)


def test_memory_is_used_and_belongs_to_client_and_mode():
    federation = train(small_federation(Scaffold(lr=0.1), "vector", modes=4, strata=2), 8)
    memory = federation.engine.client_state_tensors()
    pairs = [tuple(pair) for pair in memory["visits"].tolist()]
    assert len(set(pairs)) == len(pairs) > 6
    assert bool((memory["row.c"] != 0).any(1).all())


def test_a_failed_round_leaves_state_and_memory_as_they_were():
    federation = train(small_federation(Scaffold(lr=0.1), "loop", modes=2, strata=2), 2)
    before = {name: tensor.clone() for name, tensor in federation.tensors().items()}
    object.__setattr__(federation.algorithm, "lr", float("inf"))
    with pytest.raises(ArithmeticError, match="round 3, client"):
        next(federation.rounds(1))
    after = federation.tensors()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert federation.round == 2


def test_checkpoint_moves_between_engines(tmp_path):
    first = train(small_federation(Scaffold(lr=0.1), "vector", modes=2, strata=2), 3)
    first.save(tmp_path)
    second = Federation.load(
        tmp_path, model=small_model, data=classification(), algorithm=first.algorithm, engine="loop"
    )
    assert isinstance(second.schedule, Stratified)
    train(first, 2)
    train(second, 2)
    # engines' agreement
    torch.testing.assert_close(second.state.modes, first.state.modes, rtol=0, atol=1e-10)
