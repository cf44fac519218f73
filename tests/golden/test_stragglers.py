"""FedProx's stragglers send what they have after a random part of their steps."""

from collections import Counter

import pytest
import torch

from fedensemble import Adam, FedProx, InputError

LR, STEPS = 0.1, 4


def ends(regression, seed, **settings):
    """Where each client ends a first round, one client a mode; and where the modes started."""
    federation = regression.federation(
        FedProx(lr=LR, mu=0.5, **settings),
        steps=STEPS,
        modes=5,
        strata=5,
        seed=seed,
        schedule="stratified",
    )
    start = federation.state.modes["theta"].clone()
    report = next(federation.rounds(1))
    return start, federation.state.modes["theta"], report.plan


def steps_taken(regression, seed, stragglers):
    """How many steps clients took that had a mode of their own."""
    start, end, plan = ends(regression, seed, stragglers=stragglers)
    taken = []
    for mode in range(5):
        mine = plan.client[plan.mode == mode].tolist()
        if len(mine) == 1:
            v, path = start[mode], []
            for _ in range(STEPS):
                v = v - LR * (regression.gradient(mine[0], v) + 0.5 * (v - start[mode]))
                path.append(float((v - end[mode]).abs().max()))
            taken.append(1 + path.index(min(path)))
            assert min(path) < 1e-13
    return taken


def test_everybody_a_straggler(regression):
    counts = Counter(count for seed in range(40) for count in steps_taken(regression, seed, 1.0))
    total = sum(counts.values())
    assert total > 50
    # Uniform over 1 to 4: a count of n / 4, give or take four standard deviations.
    assert all(
        abs(counts[k] - total / 4) < 4 * (total * 3 / 16) ** 0.5 for k in range(1, STEPS + 1)
    )


def test_nobody_a_straggler(regression):
    assert set(steps_taken(regression, 0, 0.0)) == {STEPS}


def test_engines_and_slots_agree(regression):
    settings = {"rounds": 3, "clients_per_round": 3, "modes": 2, "strata": 3}
    loop, vector = (
        regression.trained(
            FedProx(lr=LR, stragglers=0.5, optimizer=Adam()), engine=engine, **settings
        ).state.modes
        for engine in ("loop", "vector")
    )
    torch.testing.assert_close(vector, loop, rtol=0, atol=1e-12)


def test_bad_share():
    with pytest.raises(InputError, match="0 <= stragglers <= 1"):
        FedProx(stragglers=1.5)
