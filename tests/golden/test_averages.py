"""Averages over rounds, compared with NumPy on the trajectory of a training without average.

One and three modes, four of six clients per round, clients of unlike size, BatchNorm, a decaying
rate, and rounds in which some mode is idle.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble import (
    EMA,
    SWA,
    SWAG,
    FedAvg,
    FederatedData,
    Federation,
    Snapshots,
    Stratified,
    evaluate,
    prng,
)
from fedensemble.testing.assertions import require_equal
from fedensemble.testing.toy_problems import labels, numbers

SIZES, FEATURES, CLASSES, ROUNDS, SEED = (7, 3, 5, 6, 9, 4), 4, 3, 14, 5
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])
MODES = pytest.mark.parametrize("modes", [1, 3])
CLOSE = {"rtol": 0, "atol": 1e-12}
AVERAGES = (
    EMA(decay=0.6),
    SWA(start=3, every=2),
    Snapshots(count=3, every=2),
    SWAG(start=2, every=1, rank=4, samples=3),
)
EACH = pytest.mark.parametrize("average", AVERAGES, ids=lambda average: type(average).__name__)


def network():
    return nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)
    )


def federation(average="none", engine="loop", modes=3, **options):
    total = sum(SIZES)
    data = FederatedData.from_arrays(
        numbers(total, FEATURES),
        labels(total),
        list(SIZES),
        x_test=numbers(25, FEATURES, word=9),
        y_test=labels(25, word=9),
    )
    per_round = 4 if modes == 1 else 2  # with 3 modes and 2 clients some mode is idle
    algorithm = FedAvg(lr=0.2, lr_decay=0.8, lr_decay_every=3)
    return Federation(
        network,
        data,
        options.pop("algorithm", algorithm),
        schedule=Stratified(modes=modes, strata=min(modes, 2), clients_per_round=per_round),
        average=average,
        engine=engine,
        steps=2,
        batch_size=3,
        dtype=torch.float64,
        seed=SEED,
        **options,
    )


def trajectory(made, rounds=ROUNDS):
    """Parameters with running statistics [K, P + R] after each round, and the modes trained."""
    states, trained = [], []
    for report in made.rounds(rounds):
        states.append(torch.cat([made.state.modes["theta"], made.state.buffers], 1).numpy())
        trained.append(report.trained)
    return states, trained


def ends_of_periods(states, trained, mode, every, start):
    """The models of one mode that SWA, snapshots and SWAG collect."""
    collected, changed = [], False
    for number in range(start + 1, len(states) + 1):
        changed = changed or mode in trained[number - 1]
        if number % every == 0 and changed:
            collected.append(states[number - 1][mode])
            changed = False
    return collected


def ema(average, states, trained, mode, parameters):
    mean, t = None, 0
    for state, modes in zip(states, trained, strict=True):
        if mode in modes:
            d = min(average.decay, t / (t + 1))
            mean = state[mode] if t == 0 else d * mean + (1 - d) * state[mode]
            t += 1
    return mean[None]


def swa(average, states, trained, mode, parameters):
    models = ends_of_periods(states, trained, mode, average.every, average.start)
    return np.mean(models, 0)[None]


def snapshots(average, states, trained, mode, parameters):
    models = ends_of_periods(states, trained, mode, average.every, average.start)
    return np.stack(models[-average.count :])


def swag(average, states, trained, mode, parameters):
    models = np.stack(ends_of_periods(states, trained, mode, average.every, average.start))
    theta, mean = models[:, :parameters], models.mean(0)
    variance = theta.var(0)
    deviations = np.stack([theta[i] - theta[: i + 1].mean(0) for i in range(len(theta))])
    last = np.zeros((average.rank, parameters))
    columns = min(average.rank, len(theta))
    last[-columns:] = deviations[-columns:]
    result = []
    for sample in range(average.samples):
        key = prng.key(SEED, "swag", mode)
        z1 = prng.normal(prng.fold_in(key, sample, 0), parameters).numpy()
        z2 = prng.normal(prng.fold_in(key, sample, 1), average.rank).numpy()
        change = np.sqrt(variance / 2) * z1 + last.T @ z2 / np.sqrt(2 * (columns - 1))
        result.append(np.concatenate([mean[:parameters] + change, mean[parameters:]]))
    return np.stack(result)


REFERENCES = {EMA: ema, SWA: swa, Snapshots: snapshots, SWAG: swag}


def predictors(ensemble):
    statistics = ensemble.predictor_buffers.expand(-1, ensemble.predictors.shape[1], -1)
    return torch.cat([ensemble.predictors, statistics], 2).numpy()


@ENGINES
@MODES
@EACH
def test_predictors_equal_the_reference(average, modes, engine):
    states, trained = trajectory(federation("none", engine, modes))
    if modes > 1:
        assert sum(len(each) < modes for each in trained) > 2  # idle modes
    made = federation(average, engine, modes)
    list(made.rounds(ROUNDS))
    found, parameters = predictors(made.ensemble), made.model.theta_layout.total
    reference = REFERENCES[type(average)]
    expected = np.stack([reference(average, states, trained, k, parameters) for k in range(modes)])
    assert found.shape == expected.shape and np.abs(found - states[-1][:, None]).max() > 1e-3
    np.testing.assert_allclose(found, expected, **CLOSE)


@ENGINES
@EACH
def test_training_is_the_same_to_the_bit(average, engine):
    plain, made = federation("none", engine), federation(average, engine)
    for one, other in zip(plain.rounds(ROUNDS), made.rounds(ROUNDS), strict=True):
        assert (one.loss, one.bytes_up, one.bytes_down) == (
            other.loss,
            other.bytes_up,
            other.bytes_down,
        )
        assert torch.equal(one.plan.client, other.plan.client)
    trained = {
        name: value for name, value in made.tensors().items() if not name.startswith("average/")
    }
    require_equal(trained, plain.tensors(), "training")


@EACH
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_resuming_is_exact(average, cut, tmp_path):
    whole, first = federation(average), federation(average)
    list(whole.rounds(ROUNDS))
    list(first.rounds(cut))
    first.save(tmp_path)
    made = federation(average)
    second = Federation.load(tmp_path, model=network, data=made.data)
    assert second.average == average
    list(second.rounds(ROUNDS - cut))
    require_equal(second.tensors(), whole.tensors(), "resumed")
    np.testing.assert_array_equal(predictors(second.ensemble), predictors(whole.ensemble))


@EACH
def test_idle_modes_do_not_move(average):
    """Between two ends of periods a row changes only if its mode is trained."""
    made = federation(average)
    period = getattr(average, "every", 1)
    list(made.rounds(6))
    moved = idle = 0
    for _ in range(6):
        before, trained = made.state.average, set()
        for report in made.rounds(period):
            trained |= set(report.trained)
        for mode in range(3):
            same = all(torch.equal(made.state.average[n][mode], before[n][mode]) for n in before)
            assert same == (mode not in trained)
            moved, idle = moved + (not same), idle + same
    assert moved and (idle or period > 1)


def test_snapshots_of_one_mode_are_an_ensemble_of_its_checkpoints():
    """FedAvg's last rounds: the prediction is the mean over the saved models' probabilities."""
    made, models = federation(Snapshots(count=4), modes=1), []
    for _ in made.rounds(7):
        models.append(made.last_ensemble.module(0))
    x = made.data.x_test
    prediction = made.ensemble.predict(x)
    with torch.no_grad():
        expected = torch.stack([model.double()(x).softmax(-1) for model in models[-4:]])
    torch.testing.assert_close(prediction.members, expected, **CLOSE)
    torch.testing.assert_close(prediction.mean, expected.mean(0), **CLOSE)
    assert prediction.mode_index.tolist() == [0] * 4 and len(prediction.modes) == 1
    assert evaluate(prediction, made.data.y_test)["mutual_information"] > 1e-5
    own = evaluate(made.last_ensemble.predict(x), made.data.y_test)
    assert own["mutual_information"] == 0


def test_swag_samples_have_the_fitted_mean_and_covariance():
    """Over many samples: half of the diagonal variance, plus the low-rank part."""
    average = SWAG(start=0, rank=3, samples=4000, scale=0.5)
    made = federation(average, modes=1)
    list(made.rounds(8))
    state = {name: value[0] for name, value in made.state.average.items()}
    samples = made.ensemble.predictors[0]
    low_rank = state["deviations"].T @ state["deviations"] / (2 * 2)
    covariance = 0.25 * (torch.diag(state["variance"]) / 2 + low_rank)
    spread = covariance.diagonal().sqrt()
    error = (samples.mean(0) - state["mean"]).abs() / spread
    assert float(error.max()) < 4.5 / 4000**0.5
    difference = (torch.cov(samples.T) - covariance) / torch.outer(spread, spread)
    assert float(difference.abs().max()) < 0.12
    diagonal = federation(SWAG(start=0, rank=0, samples=4000), modes=1)
    list(diagonal.rounds(8))
    found = diagonal.ensemble.predictors[0].var(0)
    torch.testing.assert_close(found, diagonal.state.average["variance"][0], rtol=0.15, atol=1e-12)


@pytest.mark.parametrize("average", [SWA(start=20), Snapshots(every=20), SWAG(start=20)], ids=repr)
def test_before_the_first_model_the_current_modes_predict(average):
    made = federation(average)
    list(made.rounds(3))
    x = made.data.x_test
    torch.testing.assert_close(
        made.ensemble.predict(x).mean, made.last_ensemble.predict(x).mean, **CLOSE
    )


def test_modes_with_fewer_snapshots_repeat_theirs():
    average = Snapshots(count=4)
    theta, buffers = numbers(3, 2), numbers(3, 1, word=1)
    state = average.init(theta, buffers)
    for round, trained in enumerate([[1, 0, 1], [1, 0, 0], [1, 0, 1]]):
        state = average.update(
            state, theta + round, buffers - round, torch.tensor(trained).bool(), round, 0.1
        )
    found = average.predictors(state, theta + 2, buffers - 2, 0)
    steps = torch.tensor([[0.0, 1, 2], [2, 2, 2], [0, 2, 0]], dtype=torch.float64)
    torch.testing.assert_close(found.theta, theta.unsqueeze(1) + steps.unsqueeze(-1), **CLOSE)
    torch.testing.assert_close(found.buffers, buffers.unsqueeze(1) - steps.unsqueeze(-1), **CLOSE)


def test_parameters_that_hardly_move_have_finite_samples():
    """In float32, where the difference of two second moments would be negative."""
    average, trained = SWAG(start=0, rank=2, samples=2), torch.ones(1, dtype=torch.bool)
    theta, buffers = numbers(1, 5000).float(), torch.empty(1, 0)
    state = average.init(theta, buffers)
    squares = torch.zeros_like(theta)
    for round in range(30):
        ulp = torch.randint(-1, 2, theta.shape, generator=torch.Generator().manual_seed(round))
        moved = theta * (1 + ulp * 2.0**-23)
        squares += (moved**2 - squares) / (round + 1)
        state = average.update(state, moved, buffers, trained, round, 0.1)
        assert bool(average.predictors(state, moved, buffers, 0).theta.isfinite().all())
    assert float((squares - state["mean"] ** 2).min()) < 0 <= float(state["variance"].min())


def test_cyclic_rates_and_snapshots_at_their_ends():
    algorithm = FedAvg(lr=0.5, lr_decay=0.5, lr_decay_every=4, lr_cycle=4, lr_cycle_end=0.1)
    rates = [algorithm.learning_rate(round) for round in range(8)]
    expected = [0.5 * f for f in (1.0, 0.7, 0.4, 0.1)]
    np.testing.assert_allclose(rates, expected + [r / 2 for r in expected], rtol=1e-14)
    assert FedAvg(lr=0.5, lr_cycle=5).learning_rate(4) == pytest.approx(0.005)
    assert FedAvg(lr=0.5, lr_cycle=0).learning_rate(4) == 0.5
    made = federation(Snapshots(count=2, every=4), modes=1, algorithm=algorithm)
    states, _ = trajectory(made, 10)
    np.testing.assert_allclose(
        predictors(made.ensemble)[0], np.stack([states[3][0], states[7][0]]), rtol=0, atol=0
    )
