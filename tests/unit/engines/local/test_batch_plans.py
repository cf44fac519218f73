"""The batch plans of several runs: each is what the run's engine makes on its own."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble.algorithms import FedAvg
from fedensemble.core.types import Plan
from fedensemble.core.visits.batches import batch_table
from fedensemble.core.visits.visit_keys import shared_uniform, visit_key
from fedensemble.engines.local.batch_plans import make_batch_plans
from fedensemble.engines.local.run_visits import concatenate_data
from fedensemble.testing.toy_problems import small_federation

MODES = 3
VISITS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, MODES - 1), st.integers(1, 4)),
    min_size=1,
    max_size=6,
)
ENGINES = [small_federation(FedAvg(), "vector", MODES, 2, seed=seed).engine for seed in (3, -7, 3)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(VISITS, st.integers(0, 50), st.booleans()), min_size=1, max_size=3))
def test_each_run_gets_its_own_batch_plan(runs):
    engines, plans, rounds = [], [], []
    for engine, (visits, round, partial) in zip(ENGINES, runs, strict=False):
        client, mode, steps = (torch.tensor(values) for values in zip(*visits, strict=True))
        engines.append(engine)
        plans.append(Plan(client, mode, steps if partial else None))
        rounds.append(round)
    made = make_batch_plans(engines, plans, rounds)
    assert len(made) == len(plans)
    for engine, plan, round, got in zip(engines, plans, rounds, made, strict=True):
        place = (engine.seed, round, plan.client, plan.mode)
        sizes = engine.host_sizes[plan.client]
        index, weight = batch_table(
            visit_key("batches", *place), sizes, engine.work, counts=plan.steps
        )
        index = index + engine.starts[plan.client].reshape(1, -1, 1)
        assert torch.equal(got.weight, weight)
        assert torch.equal(got.batch_index[weight], index[weight])  # others are padding
        assert torch.equal(got.model_key, visit_key("model", *place))
        assert torch.equal(got.algorithm_key, visit_key("algorithm", *place))
        assert torch.equal(got.shared_draw, shared_uniform(engine.seed, round, plan.mode))
        assert got.sizes.flatten().tolist() == sizes.tolist()
        assert got.counts.flatten().tolist() == engine.count_steps(plan).tolist()


def test_runs_that_train_together_have_their_own_rows():
    engines = [small_federation(FedAvg(), "vector", MODES, 2, seed=s).engine for s in (0, 1)]
    plan = Plan(torch.tensor([0, 5]), torch.tensor([1, 2]))
    apart = [engine.batch_plan(plan, 4) for engine in engines]
    rows = [engine.data.x[one.batch_index] for engine, one in zip(engines, apart, strict=True)]
    concatenate_data(engines)
    together = make_batch_plans(engines, [plan, plan], [4, 4])
    for engine, one, expected in zip(engines, together, rows, strict=True):
        assert torch.equal(engine.data.x[one.batch_index], expected)
