"""Between rounds: prefetched plans are the real ones, and failed rounds change nothing."""

from dataclasses import dataclass

import pytest
import torch

from fedensemble import Everybody, Federation, Plan, Scaffold, Stratified
from fedensemble.core.types import Outcome
from fedensemble.testing.toy_problems import classification, small_model, train

DATA = classification()


def federation(algorithm="fedavg", **options):
    return Federation(small_model, DATA, algorithm, **{"modes": 2, "batch_size": 3, **options})


@dataclass(frozen=True, kw_only=True)
class Slowly(Everybody):
    """Two more clients in every round."""

    def outcome(self, state, schedule, planned, round, costs):
        whole = super().outcome(state, schedule, planned, round, costs)
        return Outcome(whole.plan.select(torch.arange(len(whole.plan.client))[: 2 * round]), state)


@dataclass(frozen=True, kw_only=True)
class Learning(Stratified):
    """Selects other clients once it has seen a loss; writes into its state against the rules."""

    def plan(self, state, round):
        whole = super().plan(state, round)
        return Plan((whole.client + int(state.get("seen", 0))) % len(DATA), whole.mode)

    def observe(self, state, plan, loss):
        state["seen"] = torch.tensor(1)
        return state


@pytest.mark.parametrize(
    "changes",
    [
        {"clients_per_round": 3},
        {"clients_per_round": 5, "participation": Slowly()},
        {"modes": None, "schedule": Learning(modes=2, clients_per_round=3)},
    ],
)
def test_prefetched_plans_are_the_real_ones(changes):
    """While a GPU runs a round, the engine prefetches the next one."""
    plans = []
    for foresees in (False, True):
        made = federation(**changes)
        requested = []
        for _ in range(3):
            request = made.next_request()
            requested.append([part.tolist() for part in request.plan.tensors().values()])
            returned = made.engine.run_visits(*request)
            if foresees:
                made.prefetch_round()
            made.run_round(returned)
        plans.append((requested, made.state.modes["theta"]))
    assert plans[0][0] == plans[1][0]
    assert torch.equal(plans[0][1], plans[1][1])


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_round_that_fails_on_the_server_changes_nothing(engine, monkeypatch):
    """Neither the modes nor the client state change, and training can continue."""
    smooth, rough = (federation(algorithm=Scaffold(lr=0.1), engine=engine) for _ in range(2))
    train(smooth, 3)
    train(rough, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Scaffold, "server_update", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(rough, 1)
    train(rough, 2)
    assert all(
        torch.equal(value, rough.tensors()[name]) for name, value in smooth.tensors().items()
    )
    assert any("row" in name for name in smooth.tensors())
