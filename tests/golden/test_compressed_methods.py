"""DIANA and DORE reach the optimum through compression, where quantised SGD does not; and their formulas by hand."""

import pytest
import torch

from fedensemble import QSGD, Cohort, Diana, Dore, InputError
from fedensemble.algorithms.compress import Dither
from fedensemble.testing.problems import numbers, quadratic_problem

LR, ROUNDS = 0.1, 400
EXACT = 1e-6
NOISY = 1e-3
SAME_FORMULA = 1e-12
COMPRESSORS = [
    {"compressor": "ternary", "block": 2},
    {"compressor": "ternary", "norm": "2"},
    {"compressor": "dither", "levels": 2},
    {"compressor": "rand-k", "share": 0.4},
]


@pytest.mark.parametrize("settings", COMPRESSORS, ids=lambda s: ", ".join(map(str, s.values())))
@pytest.mark.parametrize("kind", [Diana, Dore])
def test_reaches_the_optimum(kind, settings, regression):
    assert regression.error(kind(lr=LR, **settings), ROUNDS, steps=1) < EXACT


@pytest.mark.parametrize("settings", COMPRESSORS, ids=lambda s: ", ".join(map(str, s.values())))
def test_quantised_sgd_does_not(settings, regression):
    assert regression.error(QSGD(lr=LR, weighting="uniform", **settings), ROUNDS, steps=1) > NOISY


def test_diana_with_momentum_and_with_two_clients_of_five(regression):
    assert regression.error(Diana(lr=LR, beta=0.5, server_lr=0.5), ROUNDS, steps=1) < EXACT
    assert regression.error(Diana(lr=LR, server_lr=0.5), 800, steps=1, clients_per_round=2) < EXACT


@pytest.mark.parametrize("kind", [Diana, Dore])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_server_keeps_the_weighted_mean_of_what_clients_remember(kind, weighting, regression):
    federation = regression.trained(kind(lr=LR, weighting=weighting), 7, steps=1, clients_per_round=2)
    mean = regression.mean_memory(federation, "gradient")
    torch.testing.assert_close(federation.state.modes["gradient"][0], mean, rtol=0, atol=SAME_FORMULA)


@pytest.mark.parametrize("kind", [Diana, Dore])
def test_bias_is_refused(kind):
    with pytest.raises(
        InputError, match=f"{kind.__name__} needs a compressor that is right on average; 'top-k' is not"
    ):
        kind(compressor="top-k")
    assert QSGD(compressor="top-k").quantiser.unbiased is False


@pytest.mark.parametrize("kind", [Diana, Dore, QSGD])
@pytest.mark.parametrize("compressor", ["ternary", "dither", "rand-k"])
def test_what_is_reported_is_the_length_of_the_message(kind, compressor, regression):
    algorithm = kind(lr=LR, compressor=compressor, share=0.4)
    first, report = regression.federation(algorithm).rounds(2)
    sent = algorithm.quantiser.compress(numbers(3), torch.full((3,), 0.5, dtype=torch.float64))
    length = len(algorithm.quantiser.encode(sent))
    assert report.bytes_up == 5 * length
    assert report.bytes_down == 5 * (length + 8 if kind is Dore else 3 * 8)  # and a count
    assert first.bytes_down == 5 * (3 * 8 + 8 if kind is Dore else 3 * 8)  # nobody has the model yet


def one_round(algorithm, mode, memory):
    """Uploads, memories and the cohort of a round of five visits to quadratics, with one mode's mean."""
    problem = quadratic_problem(algorithm, 5, 6)
    sent = {name: value.expand(5, -1) for name, value in algorithm.broadcast(mode).items()}
    uploads, memory = algorithm.local_training(sent, memory, problem)
    one = torch.ones(1, dtype=torch.float64)
    cohort = Cohort(5 * one, 5 * one, 5 / 8 * one, 8, 0.3 * one, lr=0.2)
    return {name: value.mean(0) for name, value in uploads.items()}, memory, cohort


def test_diana_by_hand():
    """Two rounds of its Algorithm 1, given what the quantiser made of the differences."""
    algorithm = Diana(lr=0.2, alpha=0.25, beta=0.5, server_lr=0.7, block=2)
    mode = algorithm.init_mode(numbers(6))
    memory = algorithm.init_memory(torch.zeros(5, 6, dtype=torch.float64))
    h_i, h, v, w = memory["gradient"], mode["gradient"], mode["velocity"], mode["theta"]
    for _ in range(2):
        problem = quadratic_problem(algorithm, 5, 6)
        g_i = (w - problem.descend(w.expand(5, 6))) / 0.2
        d_i = Dither(block=2).compress(g_i - h_i, problem.uniform(g_i))
        g = h + d_i.mean(0)
        v = 0.5 * v + g
        w, h, h_i = w - 0.7 * 0.2 * v, h + 0.25 * 5 / 8 * d_i.mean(0), h_i + 0.25 * d_i
        uploads, memory, cohort = one_round(algorithm, mode, memory)
        mode = algorithm.server_update(mode, uploads, cohort)
        for got, expected in (
            (mode["theta"], w),
            (mode["gradient"], h),
            (mode["velocity"], v),
            (memory["gradient"], h_i),
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=SAME_FORMULA)


def test_dore_by_hand():
    """Three rounds of its Algorithm 1, with the paper's x and q written out."""
    algorithm = Dore(lr=0.2, alpha=0.25, beta=0.8, eta=0.6, server_lr=0.7, block=2)
    mode = algorithm.init_mode(numbers(6))
    memory = algorithm.init_memory(torch.zeros(5, 6, dtype=torch.float64))
    h_i, h, e, w = memory["gradient"], mode["gradient"], mode["e"], mode["theta"]
    for _ in range(3):
        problem = quadratic_problem(algorithm, 5, 6)
        g_i = (w - problem.descend(w.expand(5, 6))) / 0.2
        d_i = Dither(block=2).compress(g_i - h_i, problem.uniform(g_i))
        x = w - 0.7 * 0.2 * (h + d_i.mean(0))
        q = x - w + 0.6 * e
        uploads, memory, cohort = one_round(algorithm, mode, memory)
        r = Dither(block=2).compress(q, cohort.uniform(q))
        w, e, h, h_i = w + 0.8 * r, q - r, h + 0.25 * 5 / 8 * d_i.mean(0), h_i + 0.25 * d_i
        mode = algorithm.server_update(mode, uploads, cohort)
        for got, expected in ((mode["theta"], w), (mode["gradient"], h), (mode["e"], e), (memory["gradient"], h_i)):
            torch.testing.assert_close(got, expected, rtol=0, atol=SAME_FORMULA)


@pytest.mark.parametrize("kind", [Diana, Dore, QSGD])
def test_bad_settings(kind):
    with pytest.raises(InputError, match=f"{kind.__name__} needs compressor"):
        kind(compressor="zip")
    with pytest.raises(InputError, match="Dithering needs block >= 1"):
        kind(block=0)
    with pytest.raises(InputError, match="needs 0 < share <= 1"):
        kind(compressor="rand-k", share=0.0)
