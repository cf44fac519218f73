"""The GPU path: CUDA graphs and batched kernels give what the loop on the CPU gives. Skipped where
there is no GPU.
"""

import pytest
import torch

from fedensemble import EngineWarning, FedAvg, Federation
from fedensemble.core.algorithm import algorithms
from fedensemble.testing.assertions import remembered
from fedensemble.testing.cases import CASES
from fedensemble.testing.toy_problems import small_federation, train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAME = 1e-9  # float64 on two machines: other kernels, other order of sums
ROUNDS = 4


def states(federation):
    named = {
        name: tensor
        for name, tensor in federation.tensors().items()
        if not name.startswith(("memory", "schedule"))
    }
    return {
        name: tensor.cpu() for name, tensor in {**named, **remembered(federation.engine)}.items()
    }


def assert_close(a, b, tolerance=SAME):
    assert a.keys() == b.keys()
    for name in a:
        if a[name].numel():
            assert float((a[name] - b[name]).abs().max()) <= tolerance, name


def of_case(case, engine, device, **options):
    return Federation(
        case.model,
        case.data(),
        FedAvg(lr=0.1, optimizer=case.optimizer),
        modes=2,
        strata=2,
        clients_per_round=4,
        engine=engine,
        device=device,
        dtype=torch.float64,
        engine_options=options,
        **{"batch_size": 4, **case.settings},
    )


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_models(case):
    reference = train(of_case(case, "loop", "cpu"), ROUNDS)
    captured = train(of_case(case, "vector", "cuda"), ROUNDS)
    assert captured.engine.graphs, captured.engine.notes
    assert_close(states(captured), states(reference))
    plain = train(of_case(case, "vector", "cuda", graphs=False, block=2), ROUNDS)
    assert_close(states(plain), states(reference))


@pytest.mark.parametrize("name", list(algorithms))
def test_algorithms(name):
    reference = train(small_federation(algorithms[name](), "loop", 3, 2), ROUNDS)
    captured = train(small_federation(algorithms[name](), "vector", 3, 2, device="cuda"), ROUNDS)
    assert captured.engine.graphs, captured.engine.notes
    assert_close(states(captured), states(reference))


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "float32"}, {"deterministic": True}]
)
def test_the_same_seed_gives_the_same_bytes(options):
    from fedensemble.models import CNN
    from fedensemble.testing.toy_problems import labels, numbers, ragged

    def trained():
        data = ragged(numbers(60, 1, 28, 28).float(), labels(60, classes=10), (20, 7, 33))
        made = Federation(
            lambda: CNN((1, 28, 28), 10),
            data,
            FedAvg(lr=0.1),
            modes=2,
            device="cuda",
            batch_size=8,
            engine_options=options,
        )
        return states(train(made, 5))

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_norms_give_the_same_bytes(norm, precision):
    from fedensemble.models import ResNet20
    from fedensemble.testing.toy_problems import labels, numbers, ragged

    def trained():
        data = ragged(numbers(60, 3, 16, 16).float(), labels(60, classes=10), (20, 7, 33))
        made = Federation(
            lambda: ResNet20((3, 16, 16), 10, norm=norm),
            data,
            FedAvg(lr=0.1),
            modes=2,
            device="cuda",
            batch_size=7,
            engine_options={"precision": precision},
        )
        return states(train(made, 3))

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


FLOAT32 = 2e-3  # two rounds of small steps in float32


def test_group_norms_have_kernels(monkeypatch):
    """Residual blocks as the loop trains them, every norm by kernels, all but the shortcuts' with
    what follows them.
    """
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm
    from fedensemble.models import ResNet18
    from fedensemble.testing.toy_problems import labels, numbers, ragged

    used, known = [], GroupNorm.statistics
    monkeypatch.setattr(
        GroupNorm,
        "statistics",
        lambda self, *given: used.append(self.groups) or known(self, *given),
    )
    data = ragged(numbers(24, 3, 16, 16).float(), labels(24, classes=4), (8, 5, 11))

    def made(engine, device, **options):
        return Federation(
            lambda: ResNet18((3, 16, 16), 4, norm="group", width=16),
            data,
            FedAvg(lr=0.02),
            modes=2,
            engine=engine,
            device=device,
            batch_size=4,
            engine_options=options,
        )

    captured = made("vector", "cuda", precision="float32")
    assert captured.engine.fusions.count("add_relu") == 8
    assert captured.engine.fusions.count("relu") == 9
    train(captured, 2)
    assert captured.engine.graphs, captured.engine.notes
    assert used and len(used) % 20 == 0  # of a pass
    assert_close(states(captured), states(train(made("loop", "cpu"), 2)), FLOAT32)


@pytest.mark.parametrize(
    "norm", [torch.nn.BatchNorm1d, lambda channels: torch.nn.GroupNorm(2, channels)]
)
def test_a_view_that_kernels_do_not_allow_is_found_on_trial(norm):
    from fedensemble import FederatedData

    class Viewed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = norm(4), torch.nn.Linear(24, 3)

        def forward(self, x):
            return self.out(self.norm(x).view(len(x), 24))

    data = FederatedData.from_arrays(
        torch.randn(20, 4, 6), torch.arange(20) % 3, [8, 12], classes=3
    )
    with pytest.warns(EngineWarning, match="using vmap"):
        made = Federation(Viewed, data, FedAvg(lr=0.1), batch_size=4, device="cuda")
    train(made, 1)


def test_bf16_and_tf32_converge_as_float32():
    from sklearn.datasets import load_digits

    from fedensemble import FederatedData, evaluate
    from fedensemble.models import MLP

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    data = FederatedData.from_clients([(x[i::20], y[i::20]) for i in range(20)])
    accuracy = {}
    for precision in ("float32", "tf32", "bf16"):
        made = Federation(
            lambda: MLP((64,), 10),
            data,
            FedAvg(lr=0.3),
            modes=2,
            clients_per_round=10,
            device="cuda",
            batch_size=16,
            epochs=2,
            engine_options={"precision": precision},
        )
        train(made, 60)
        accuracy[precision] = evaluate(made.ensemble.predict(x), y)["accuracy"]
    assert min(accuracy.values()) > 0.95
    assert max(accuracy.values()) - min(accuracy.values()) < 0.01


def test_memory_does_not_grow():
    made = small_federation(FedAvg(lr=0.01), "vector", 3, 2, device="cuda")
    train(made, 20)
    before = torch.cuda.memory_allocated()
    train(made, 200)
    assert torch.cuda.memory_allocated() <= before + 1024


def test_too_little_memory_halves_the_block(monkeypatch):
    made = small_federation(FedAvg(), "vector", 3, 2, device="cuda")
    reference = train(small_federation(FedAvg(), "vector", 3, 2, device="cuda"), ROUNDS)
    real = type(made.engine)._train_captured
    made.engine.block = 4

    def crowded(self, algorithm, given, ragged):
        if len(given.model_key) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, algorithm, given, ragged)

    monkeypatch.setattr(type(made.engine), "_train_captured", crowded)
    with pytest.warns(EngineWarning, match="Out of memory in round 1"):
        train(made, ROUNDS)
    assert made.engine.block == 2
    assert_close(states(made), states(reference))


# of a gradient: units near 0 fall on the ReLU's other side
TOLERANCES = {"float32": 1e-2, "tf32": 1e-1, "bf16": 0.25}
# its gradient moves by 0.8 % in float64, too, if weights move by as much as float32 rounds
MOBILENET = 5e-2


# MobileNet ends with BatchNorm over single pixels of a batch, which blows up rounding: only float32
# tells anything.
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, each)
        for name in ("cnn", "cnn-pfl", "resnet20", "resnet20 group", "lstm")
        for each in TOLERANCES
    ]
    + [("mobilenet", "float32")],
)
def test_gradients_in_every_precision(name, precision):
    """The kernels of float32 and below against float64, through whole models."""
    from fedensemble import FederatedData
    from fedensemble.engines.stacked.gradient import stacked_gradient
    from fedensemble.modeling.functional_model import FunctionalModel
    from fedensemble.models import models

    name, _, norm = name.partition(" ")
    text, visits, batch = name == "lstm", 3, 8
    torch.manual_seed(0)
    x = torch.randint(0, 9, (visits * batch, 6)) if text else torch.randn(visits * batch, 3, 32, 32)
    y = torch.randint(0, 9, (visits * batch, 6) if text else (visits * batch,))
    given = (
        {"outputs": 9}
        if text
        else {"outputs": 9, "shape": (3, 32, 32), **({"norm": norm} if norm else {})}
    )
    data = FederatedData.from_arrays(x, y, [batch] * visits, classes=9)
    made = Federation(
        lambda: models[name](**given),
        data,
        FedAvg(),
        batch_size=batch,
        device="cuda",
        engine_options={"precision": precision},
    )
    theta, buffers = (tensor.cuda() for tensor in made.model.init_params(0, visits))
    x, y = (tensor.reshape(visits, batch, *tensor.shape[1:]).cuda() for tensor in (x, y))
    more = (
        torch.ones(visits, batch, dtype=torch.bool, device="cuda"),
        torch.arange(visits, device="cuda"),
    )
    with made.engine.settings():
        gradient, (loss, new) = made.engine.gradient(theta, buffers, x, y, *more)
    exact = FunctionalModel(
        lambda: models[name](**given), "cross_entropy", y[0], torch.device("cuda"), torch.float64
    )
    wide = x if text else x.double()
    expected = stacked_gradient(exact)(theta.double(), buffers.double(), wide, y, *more)
    for a, b in ((gradient, expected[0]), (loss, expected[1][0]), (new, expected[1][1])):
        if a.numel():
            assert float((a.double() - b).norm() / b.norm()) < (
                MOBILENET if name == "mobilenet" else TOLERANCES[precision]
            )


@pytest.mark.parametrize("name", ["cnn", "resnet20", "lstm"])
def test_models_are_folded_in_float32(name):
    from fedensemble import FederatedData
    from fedensemble.models import models

    text = name == "lstm"
    x = torch.randint(0, 9, (40, 6)) if text else torch.randn(40, 3, 32, 32)
    y = torch.randint(0, 9, (40, 6) if text else (40,))
    data = FederatedData.from_arrays(x, y, [10] * 4, classes=9)
    given = {"outputs": 9} if text else {"outputs": 9, "shape": (3, 32, 32)}
    made = Federation(
        lambda: models[name](**given), data, FedAvg(lr=0.01), modes=2, batch_size=5, device="cuda"
    )
    assert not made.engine.notes
    next(made.rounds(1))


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_images_kept_as_bytes(name):
    from fedensemble import FederatedData
    from fedensemble.data import Standardise
    from fedensemble.models import models

    x = torch.randint(0, 256, (40, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    look = Standardise(mean=(120.0, 110.0, 100.0), std=(60.0, 61.0, 62.0))
    data = FederatedData.from_arrays(
        x, torch.arange(40) % 4, [16, 8, 12, 4], standardise=look, classes=4
    )
    options = {"augment": True} if name == "resnet20" else {}

    def made(engine, device):
        return Federation(
            lambda: models[name](shape=(3, 16, 16), outputs=4, **options),
            data,
            FedAvg(lr=0.1),
            modes=2,
            engine=engine,
            device=device,
            dtype=torch.float64,
            batch_size=4,
        )

    captured = train(made("vector", "cuda"), 3)
    assert captured.engine.graphs, captured.engine.notes
    assert_close(states(captured), states(train(made("loop", "cpu"), 3)))


def test_runs_side_by_side():
    from fedensemble.engines.local.run_visits import concatenate_data, run_visits
    from fedensemble.testing.toy_problems import labels, numbers, ragged

    def made(sizes, seed, lr):
        from fedensemble.models import CNN

        data = ragged(numbers(sum(sizes), 1, 28, 28).float(), labels(sum(sizes), classes=10), sizes)
        return Federation(
            lambda: CNN((1, 28, 28), 10),
            data,
            FedAvg(lr=lr),
            modes=2,
            device="cuda",
            batch_size=8,
            dtype=torch.float64,
            seed=seed,
        )

    settings = [((20, 7, 33), 0, 0.1), ((50, 9), 1, 0.05), ((20, 7, 33), 2, 0.2)]
    joined, apart = (
        [made(*setting) for setting in settings],
        [made(*setting) for setting in settings],
    )
    concatenate_data([federation.engine for federation in joined])
    for _ in range(ROUNDS):
        requests = [federation.next_request() for federation in joined]
        answers = run_visits([federation.engine for federation in joined], requests)
        for federation, answer in zip(joined, answers, strict=True):
            federation.prefetch_round()
            federation.run_round(answer)
    assert joined[0].engine.graphs, joined[0].engine.notes
    for one, other in zip(joined, apart, strict=True):
        assert_close(states(one), states(train(other, ROUNDS)))


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_client_memory_off_the_card(place):
    from fedensemble.algorithms import Scaffold

    made = small_federation(
        Scaffold(), "vector", 3, 2, device="cuda", engine_options={"client_memory": place}
    )
    reference = small_federation(Scaffold(), "loop", 3, 2)
    assert_close(states(train(made, ROUNDS)), states(train(reference, ROUNDS)))


@pytest.mark.parametrize("alternate", [False, True])
def test_personal_parts_are_trained_by_graphs(alternate):
    from fedensemble.algorithms import Scaffold

    options = {"personal": ["2.*"], "alternate": alternate}
    made = train(small_federation(Scaffold(), "vector", 3, 2, device="cuda", **options), ROUNDS)
    assert made.engine.graphs, made.engine.notes
    reference = small_federation(Scaffold(), "loop", 3, 2, **options)
    assert_close(states(made), states(train(reference, ROUNDS)))


def test_rounds_divided_by_length_are_those_of_a_loop():
    """Blocks of visits with similar numbers of steps, captured one by one."""
    options = {"clients_per_round": 6}
    loop = small_federation(FedAvg(lr=0.1), "loop", 2, 2, **options)
    options |= {"device": "cuda", "engine_options": {"divide": True}}
    vector = small_federation(FedAvg(lr=0.1), "vector", 2, 2, **options)
    assert vector.engine.step_overhead > 6  # too small a model to be divided
    vector.engine.step_overhead = 0.1
    for _ in range(4):
        assert vector.run_round().loss == pytest.approx(loop.run_round().loss, rel=1e-9)
    assert len(vector.engine._captured) > 1
    torch.testing.assert_close(
        vector.ensemble.theta.cpu(), loop.ensemble.theta, rtol=1e-9, atol=1e-11
    )
