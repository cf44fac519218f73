"""A federation's errors say what is wrong and what to do; saving and loading."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedensemble import (
    SGD,
    Adam,
    Balanced,
    DivergedError,
    FedAvg,
    FederatedData,
    Federation,
    FedProx,
    InputError,
    Stratified,
)
from fedensemble.core.optimizer import Optimizer
from fedensemble.federation.resolve import select_device
from fedensemble.testing.toy_problems import (
    SIZES,
    classification,
    labels,
    numbers,
    ragged,
    small_model,
    train,
)

DATA = classification()


def federation(model=small_model, data=DATA, algorithm="fedavg", **options):
    return Federation(model, data, algorithm, **{"modes": 2, "batch_size": 3, **options})


def regression(outputs=1):
    return ragged(numbers(sum(SIZES), 4), numbers(sum(SIZES), outputs))


def batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


ERRORS = {
    "an instance for a model": (
        {"model": small_model()},
        "callable that returns a new nn.Module.*got Sequential",
    ),
    "a number for a model": ({"model": 3}, "callable that returns a new nn.Module"),
    "a factory of something else": ({"model": lambda: 3}, "must return an nn.Module; got int"),
    "nothing to train": ({"model": nn.Flatten}, "Flatten has no trainable parameters"),
    "lazy layers": ({"model": lambda: nn.LazyLinear(3)}, "Lazy layers"),
    "a wrong input size": (
        {"model": lambda: nn.Linear(7, 3)},
        r"cannot take inputs of shape \(8, 4\)",
    ),
    "two outputs": ({"model": lambda: nn.LSTM(4, 3)}, "must return one tensor; got tuple"),
    "labels outside the outputs": (
        {"model": lambda: nn.Linear(4, 2)},
        "Labels go up to 2, but the model has 2 outputs; it needs at least 3",
    ),
    "float targets": (
        {"model": lambda: nn.Linear(4, 1), "data": regression()},
        "needs integer labels.*use loss='mse'",
    ),
    "mse of another shape": (
        {"model": lambda: nn.Linear(4, 3), "data": regression(2), "loss": "mse"},
        r"outputs have shape \(8, 3\), the targets \(8, 2\)",
    ),
    "an unknown loss": (
        {"loss": "cross_entrophy"},
        "unknown loss 'cross_entrophy': did you mean 'cross_entropy'",
    ),
    "an unknown engine": ({"engine": "vectors"}, "unknown engine 'vectors': did you mean 'vector'"),
    "an unknown algorithm": (
        {"algorithm": "fedavgg"},
        "unknown algorithm 'fedavgg': did you mean 'fedavg'",
    ),
    "an unknown schedule": (
        {"schedule": "stratify"},
        "unknown schedule 'stratify': did you mean 'stratified'",
    ),
    "a class for an algorithm": (
        {"algorithm": FedAvg},
        "must be an Algorithm or a registered name",
    ),
    "an unknown engine option": (
        {"engine_options": {"blocks": 3}},
        "option of engine 'vector' 'blocks': did you mean 'block'",
    ),
    "an option of another engine": (
        {"engine": "loop", "engine_options": {"block": 3}},
        "unknown option of engine 'loop' 'block'",
    ),
    "a block of nothing": (
        {"engine_options": {"block": 0}},
        "needs block to be an integer >= 1; got block=0",
    ),
    "BatchNorm with keep": (
        {"model": batch_norm, "last_batch": "keep"},
        "last_batch='keep'.*use 'wrap' or 'drop'",
    ),
    "BatchNorm that counts": (
        {"model": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))},
        "momentum=None",
    ),
    "more clients than there are": (
        {"clients_per_round": 7},
        "clients_per_round <= clients; got clients_per_round=7, clients=6. Lower clients_per_round",
    ),
    "more strata than clients": (
        {"strata": 7},
        "strata <= clients; got strata=7, clients=6. Lower strata",
    ),
    "more strata than clients per round": (
        {"strata": 4, "clients_per_round": 3},
        "strata <= clients_per_round.*got strata=4, clients_per_round=3",
    ),
    "no clients per round": ({"clients_per_round": 0}, "clients_per_round >= 1; got 0"),
    "no modes": ({"modes": 0}, "modes >= 1; got 0"),
    "no strata": ({"strata": 0}, "strata >= 1; got 0"),
    "a device that is none": ({"device": "gpu"}, "device is 'cpu', 'cuda'.*got 'gpu'"),
    "no class scores": (
        {"model": lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))},
        r"got shape \(8,\)",
    ),
    "a long seed": ({"seed": 2**63}, "at most 63 bits"),
    "a word for a seed": ({"seed": "zero"}, "integer.*'zero'"),
    "batches of nothing": ({"batch_size": 0}, "batch_size >= 1; got 0"),
    "no epochs": ({"epochs": 0}, "epochs >= 1"),
    "no steps": ({"steps": 0}, "steps >= 1"),
    "an unknown last batch": (
        {"last_batch": "skip"},
        "last_batch is 'keep', 'wrap' or 'drop'; got 'skip'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    options, says = ERRORS[name]
    with pytest.raises(InputError, match=says):
        federation(**options)


def test_combine_must_fit_the_task():
    with pytest.raises(InputError, match="'probabilities' or 'logits' for classification"):
        federation(combine="outputs").ensemble


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device():
    with pytest.raises(InputError, match="no CUDA device here; use 'cpu' or 'auto'"):
        federation(device="cuda")
    for device in ("mps", "xpu", "hpu", "meta", torch.device("mps")):
        if not (str(device) in ("mps", "xpu") and getattr(torch, str(device)).is_available()):
            with pytest.raises(
                InputError, match=f"device '{device}'.* cannot compute on one here; use 'cpu' or"
            ):
                federation(device=device)
    assert federation(device="auto").model.device.type == "cpu"
    assert federation(device=torch.device("cpu")).model.device.type == "cpu"


def test_a_cuda_device_too_many(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(
        InputError, match="device 'cuda:2' was asked for, but here there is only cuda:0, cuda:1"
    ):
        select_device("cuda:2")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedAvg(lr=0), "FedAvg needs lr > 0; got 0"),
        (lambda: FedAvg(lr=float("nan")), "FedAvg needs lr to be a finite number; got nan"),
        (lambda: FedAvg(lr_decay=1.5), "lr_decay <= 1"),
        (lambda: FedAvg(lr_decay_every=0), "lr_decay_every >= 1"),
        (lambda: FedAvg(weighting="examlpes"), "'examples' or 'uniform'"),
        (lambda: FedAvg(optimizer=0.9), "needs an optimizer such as 'adam', SGD"),
        (lambda: FedProx(mu=-1), "FedProx needs mu >= 0; got -1"),
        (lambda: SGD(momentum=1.0), "SGD needs 0 <= momentum < 1"),
        (lambda: SGD(clip=-1), "SGD needs clip >= 0"),
        (lambda: Adam(beta2=1.0), "Adam needs 0 <= beta2 < 1"),
    ],
)
def test_settings_are_checked(make, says):
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_loss_that_is_not_finite_names_the_visit(engine):
    """Client 1's inputs overflow in the model; every other client's loss stays finite."""
    x = numbers(sum(SIZES), 4)
    x[SIZES[0] : SIZES[0] + SIZES[1]] = 1e200

    def model():
        class Squares(nn.Linear):
            def forward(self, x):
                return super().forward(x**2)

        return Squares(4, 3)

    made = federation(
        model, ragged(x, labels(sum(SIZES))), engine=engine, dtype=torch.float64, modes=3
    )
    plan = made.schedule.plan(made.state.schedule, 0)
    mode = int(plan.mode[plan.client == 1])
    with pytest.raises(
        DivergedError, match=rf"loss became (nan|inf) at round 1, client 1, mode {mode} \(step 1\)"
    ):
        next(made.rounds(1))
    assert made.round == 0


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_divergence_names_the_step(engine):
    made = federation(
        lambda: nn.Linear(4, 1),
        regression(),
        FedAvg(lr=1e120),
        loss="mse",
        engine=engine,
        dtype=torch.float64,
        epochs=3,
        modes=1,
    )
    with pytest.raises(
        DivergedError,
        match=r"client 0, mode 0 \(step [234]\) \(\d more visits diverged\).*Lower lr, or set optimizer.clip",
    ):
        next(made.rounds(1))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_weights_that_overflow_in_the_last_step_are_caught(engine):
    # beyond float32
    made = federation(small_model, algorithm=FedAvg(lr=1e45), engine=engine, modes=1, steps=1)
    with pytest.raises(DivergedError, match=r"mode 0 \(step 1\)"):
        next(made.rounds(1))


def test_report():
    made = federation(modes=3, strata=2, clients_per_round=4, dtype=torch.float64)
    reports = list(made.rounds(7))
    assert [report.round for report in reports] == list(range(1, 8))
    assert [report.age for report in reports] == [1, 1, 1, 2, 2, 2, 3]
    size = made.model.theta_layout.total * 8
    for report in reports:
        assert len(report.losses) == len(report.plan.client) == 4
        assert report.loss == pytest.approx(float(report.losses.mean()))
        assert report.bytes_up == report.bytes_down == 4 * size
        assert set(report.trained) == set(report.plan.mode.tolist())


def test_rounds_are_trained_one_by_one():
    made = federation()
    rounds = made.rounds(5)
    assert made.round == 0
    next(rounds)
    assert made.round == 1


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
def test_defaults():
    assert federation(modes=1).schedule == Balanced(modes=1, strata=1, clients_per_round=6)
    assert federation(clients_per_round=4).schedule == Balanced(
        modes=2, strata=4, clients_per_round=4
    )
    paper = Stratified(modes=3, strata=3, clients_per_round=5)
    assert federation(schedule=paper).schedule is paper
    assert federation(batch_size=1000).work.batch_size == max(SIZES)
    assert federation().work.last_batch == "keep"
    assert federation(batch_norm).work.last_batch == "wrap"
    running = nn.InstanceNorm1d(2, track_running_stats=True)
    assert (
        federation(
            lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), running, nn.Flatten(), nn.Linear(4, 3))
        ).work.last_batch
        == "wrap"
    )


def test_modes_differ_and_mode_k_starts_the_same_in_every_ensemble():
    few, many = federation(modes=2).state.modes["theta"], federation(modes=5).state.modes["theta"]
    assert torch.equal(many[:2], few)
    assert len(torch.unique(many, dim=0)) == 5
    assert not torch.equal(federation(seed=1).state.modes["theta"], few)


def test_torchs_global_generator_does_not_change():
    before = torch.get_rng_state()
    train(federation(lambda: nn.Sequential(small_model(), nn.Dropout(0.5))), 2).ensemble.predict(
        DATA.x, dropout=True
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
def test_a_scalar_parameter_trains():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.tensor(1.0)), nn.Linear(4, 3)

        def forward(self, x):
            return self.scale * self.layer(x)

    results = [
        train(federation(Scaled, engine=engine, dtype=torch.float64), 2).state.modes
        for engine in ("loop", "vector")
    ]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)  # engines' agreement


def test_dropout_runs_of_two_engines_agree_in_float32():
    model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    results = [
        train(federation(model, engine=engine), 3).state.modes for engine in ("loop", "vector")
    ]
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)  # float32 has seven digits


class TestSaveAndLoad:
    def test_goes_on_as_if_it_had_never_stopped(self, tmp_path):
        options = {
            "algorithm": FedProx(lr=0.2, mu=0.1, optimizer=Adam(clip=2.0)),
            "schedule": Balanced(modes=2, strata=3, clients_per_round=4),
            "combine": "logits",
            "epochs": 2,
            "seed": 4,
            "engine_options": {"block": 2},
        }
        whole = train(federation(batch_norm, **options), 5)
        train(federation(batch_norm, **options), 2).save(tmp_path)
        loaded = Federation.load(tmp_path, model=batch_norm, data=DATA)
        assert (loaded.algorithm, loaded.schedule, loaded.work) == (
            whole.algorithm,
            whole.schedule,
            whole.work,
        )
        assert (loaded.combine, loaded.seed, loaded.engine.block, loaded.round) == (
            "logits",
            4,
            2,
            2,
        )
        train(loaded, 3)
        for name, tensor in whole.tensors().items():
            assert torch.equal(loaded.tensors()[name], tensor), name

    def test_changes(self, tmp_path):
        federation().save(tmp_path)
        loaded = Federation.load(tmp_path, model=small_model, data=DATA, engine="loop")
        assert type(loaded.engine).__name__ == "LoopEngine"

    def test_unregistered_parts_are_asked_for(self, tmp_path):
        @dataclass(frozen=True, kw_only=True)
        class Mine(FedAvg):
            pass

        @dataclass(frozen=True, kw_only=True)
        class Other(Stratified):
            pass

        def loss(outputs, targets):
            return nn.functional.cross_entropy(outputs, targets)

        algorithm, schedule = Mine(), Other(modes=2, strata=2, clients_per_round=3)
        federation(algorithm=algorithm, schedule=schedule, loss=loss).save(tmp_path)
        parts = {"model": small_model, "data": DATA}
        with pytest.raises(
            InputError, match=r"algorithm saved in .* pass algorithm=\.\.\. to load"
        ):
            Federation.load(tmp_path, **parts)
        with pytest.raises(InputError, match="pass schedule="):
            Federation.load(tmp_path, **parts, algorithm=algorithm)
        with pytest.raises(InputError, match="pass loss="):
            Federation.load(tmp_path, **parts, algorithm=algorithm, schedule=schedule)
        assert (
            Federation.load(
                tmp_path, **parts, algorithm=algorithm, schedule=schedule, loss=loss
            ).round
            == 0
        )

    def test_an_unregistered_optimizer_asks_for_the_algorithm(self, tmp_path):
        @dataclass(frozen=True, kw_only=True)
        class Plain(Optimizer):
            def init_state(self, theta):
                return {}

            def step(self, theta, gradient, slots, lr):
                return theta - lr * gradient, slots

        federation(algorithm=FedAvg(optimizer=Plain())).save(tmp_path)
        with pytest.raises(InputError, match="pass algorithm="):
            Federation.load(tmp_path, model=small_model, data=DATA)

    def test_another_model(self, tmp_path):
        federation().save(tmp_path)
        with pytest.raises(OSError, match="does not fit"):
            Federation.load(tmp_path, model=lambda: nn.Linear(4, 3), data=DATA)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(OSError, match="There is no folder"):
            Federation.load(tmp_path / "nowhere", model=small_model, data=DATA)


def test_data_on_one_client():
    data = FederatedData.from_clients([(numbers(5, 4), labels(5))])
    assert train(federation(data=data, modes=3), 3).round == 3
