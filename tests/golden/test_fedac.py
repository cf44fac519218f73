"""FedAc against its Algorithm 1 in NumPy, and against the accelerated method it is on one client."""

import numpy as np
import pytest
import torch

from fedensemble import SGD, FedAc, InputError

ROUNDS, LR, MU = 6, 0.1, 0.5
SAME_FORMULA = 1e-12  # float64, some hundred operations on numbers of order one


def coupled(coupling, steps):
    gamma = max(np.sqrt(LR / (MU * steps)), LR)
    if coupling == "I":
        alpha = 1 / (gamma * MU)
        return gamma, alpha, alpha + 1
    alpha = 3 / (2 * gamma * MU) - 1 / 2
    return gamma, alpha, (2 * alpha**2 - 1) / (alpha - 1)


@pytest.mark.parametrize("coupling", ["I", "II"])
@pytest.mark.parametrize("steps", [1, 4, 40])
def test_step_by_step(coupling, steps, regression):
    federation = regression.federation(FedAc(lr=LR, mu=MU, coupling=coupling), steps=steps)
    gamma, alpha, beta = coupled(coupling, steps)
    w = w_ag = federation.state.modes["theta"][0].numpy().copy()
    shares = regression.weights("examples").numpy()
    for _ in federation.rounds(ROUNDS):
        ends = []
        for a, b in regression.forms:
            v, v_ag = w, w_ag
            for _ in range(steps):
                md = v / beta + (1 - 1 / beta) * v_ag
                g = a.numpy() @ md - b.numpy()
                v_ag = md - LR * g
                v = (1 - 1 / alpha) * v + md / alpha - gamma * g
            ends.append((v, v_ag))
        w, w_ag = (sum(s * end[part] for s, end in zip(shares, ends, strict=True)) for part in (0, 1))
        np.testing.assert_allclose(federation.state.modes["w"][0].numpy(), w, rtol=0, atol=SAME_FORMULA)
        np.testing.assert_allclose(federation.state.modes["theta"][0].numpy(), w_ag, rtol=0, atol=SAME_FORMULA)


def test_acceleration(regression):
    """With one local step it is an accelerated method: far ahead of gradient descent on the mean."""
    rounds, mu = 60, 0.3
    got = regression.error(FedAc(lr=LR, mu=mu), rounds, steps=1)
    w = regression.federation(FedAc(), steps=1).state.modes["theta"][0]
    for _ in range(rounds):
        mean = sum(s * regression.gradient(i, w) for i, s in enumerate(regression.weights("examples")))
        w = w - LR * mean
    assert got < 0.1 * float((w - regression.optimum("examples")).abs().max())


def test_it_steps_by_itself():
    with pytest.raises(InputError, match="SGD without momentum"):
        FedAc(optimizer=SGD(momentum=0.9))
    with pytest.raises(InputError, match="mu < 1 / lr"):
        FedAc(lr=0.5, mu=2.0)


def test_clipping_and_weight_decay_still_count(regression):
    plain, decayed = (
        regression.trained(FedAc(lr=LR, optimizer=SGD(weight_decay=decay)), 3).state.modes["theta"]
        for decay in (0.0, 1.0)
    )
    assert float(decayed.norm()) < float(plain.norm())
    assert bool(torch.isfinite(decayed).all())
