"""FedAc against its Algorithm 1 in NumPy, and against the accelerated method it is on one
client.
"""

import numpy as np
import pytest
import torch

from fedensemble import SGD, FedAc, FedAvg, FederatedData, Federation, InputError
from fedensemble.testing.toy_problems import labels, numbers, small_model

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
        w, w_ag = (
            sum(s * end[part] for s, end in zip(shares, ends, strict=True)) for part in (0, 1)
        )
        np.testing.assert_allclose(
            federation.state.modes["w"][0].numpy(), w, rtol=0, atol=SAME_FORMULA
        )
        np.testing.assert_allclose(
            federation.state.modes["theta"][0].numpy(), w_ag, rtol=0, atol=SAME_FORMULA
        )


def test_acceleration(regression):
    """With one local step it is an accelerated method: far ahead of gradient descent on the
    mean.
    """
    rounds, mu = 60, 0.3
    got = regression.error(FedAc(lr=LR, mu=mu), rounds, steps=1)
    w = regression.federation(FedAc(), steps=1).state.modes["theta"][0]
    for _ in range(rounds):
        mean = sum(
            s * regression.gradient(i, w) for i, s in enumerate(regression.weights("examples"))
        )
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


def many_clients(algorithm, modes, clients_per_round, schedule="stratified"):
    data = FederatedData.from_arrays(numbers(40, 4), labels(40), [2] * 20)
    return Federation(
        small_model,
        data,
        algorithm,
        modes=modes,
        clients_per_round=clients_per_round,
        schedule=schedule,
    )


@pytest.mark.parametrize(
    ("modes", "per_round", "schedule", "mu"),
    [
        (1, 10, "stratified", 0.01),
        (5, 10, "stratified", 0.25),
        (2, 10, "balanced", 0.04),
        (5, 10, "independent", 0.01),
        (2, 10, "independent-kfold", 0.01),
        (4, 4, "stratified", 0.3),
        (1, 20, "stratified", 0.003),
    ],
)
def test_mu_follows_from_the_clients_per_mode(modes, per_round, schedule, mu):
    federation = many_clients(FedAc(), modes, per_round, schedule)
    assert federation.algorithm.chosen_mu == pytest.approx(mu)
    sent = federation.next_request().sent
    assert sent["mu"].shape == (modes, 1) and float(sent["mu"][0]) == pytest.approx(mu)
    (note,) = federation.algorithm.notes
    assert f"mu = {mu:.3g}" in note and "set mu" in note
    assert federation.algorithm.mu is None  # what is saved is what was asked for


def test_a_chosen_mu_is_the_same_as_a_given_one():
    chosen, given = (many_clients(FedAc(lr=0.2, mu=mu), 2, 10) for mu in (None, 0.04))
    for federation in (chosen, given):
        for report in federation.rounds(3):
            assert report.bytes_up == 10 * 2 * 4 * federation.model.theta_layout.total
    torch.testing.assert_close(
        chosen.state.modes["theta"], given.state.modes["theta"], rtol=0, atol=1e-6
    )
    assert (
        "mu" not in given.next_request().sent
        and set(chosen.state.modes) == {"theta", "w"}
        and given.algorithm.notes == ()
    )


def test_a_large_rate_keeps_the_coupling_valid():
    assert many_clients(FedAc(lr=10.0), 4, 4).algorithm.chosen_mu == pytest.approx(0.05)


def test_one_mode_is_accelerated_by_default():
    """With twenty clients per mode it is ahead of FedAvg after the same rounds."""
    losses = {}
    for algorithm in (FedAc(lr=0.05), FedAvg(lr=0.05)):
        *_, last = many_clients(algorithm, 1, 20).rounds(30)
        losses[type(algorithm)] = last.loss
    assert losses[FedAc] < 0.9 * losses[FedAvg]
