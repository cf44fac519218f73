"""Frozen parameters exist once: in memory, in messages, in files, and in what predicts."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.engines.distributed.process_group import ProcessGroup
from fedensemble.errors import InputError, StoreError
from fedensemble.experiment.setup import _require_same_frozen

WIDTH = 24
torch.manual_seed(0)
BODY = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
FROZEN = 2 * (WIDTH * WIDTH + WIDTH)


class Tuned(nn.Module):
    """A frozen body between a trained layer and a trained head; BatchNorm has buffers."""

    def __init__(self, body=BODY, norm=False):
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.body = copy.deepcopy(body).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(self.first(x)))))


TRAINED = 4 * WIDTH + WIDTH + 2 * WIDTH + 2


def examples():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    return fe.FederatedData.from_arrays(
        x, (x.sum(1) > 0).long(), [10, 20, 30], x_test=x[:10], y_test=(x[:10].sum(1) > 0).long()
    )


def made(model=Tuned, algorithm=None, **options):
    settings = {"modes": 2, "strata": 1, "batch_size": 5, "last_batch": "drop", **options}
    return fe.Federation(model, examples(), algorithm or fe.FedAvg(lr=0.2), **settings)


def with_norm():
    return Tuned(norm=True)


def changed(factor=1.001):
    body = copy.deepcopy(BODY)
    with torch.no_grad():
        body[2].bias.mul_(factor)
    return lambda: Tuned(body)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_frozen_parameters_are_in_no_vector_and_no_message(engine):
    federation = made(with_norm, engine=engine)
    theta, statistics = TRAINED + 2 * WIDTH, 2 * WIDTH
    assert federation.state.modes["theta"].shape == (2, theta)
    assert federation.state.buffers.shape == (2, statistics)
    report = federation.train(1)[0]
    sent = 4 * (theta + statistics)
    assert {report.bytes_down, report.bytes_up} == {len(report.plan.client) * sent}
    for name, value in BODY.named_parameters():
        assert torch.equal(federation.model.frozen[f"body.{name}"], value)
    assert sum(value.numel() for value in federation.model.frozen.values()) == FROZEN


def test_what_a_visit_costs_has_the_frozen_part_once():
    federation = made(engine="vector")
    memory, plain = federation.visit_memory, made(Tuned, engine="loop").visit_memory
    assert memory.frozen == plain.frozen == federation.model.frozen_bytes == 4 * FROZEN
    assert memory.parameters == memory.gradients == memory.uploads == 4 * TRAINED
    assert str(memory).endswith("; frozen parameters 4.7 KiB, once for all")
    assert "frozen parameters" not in str(made(lambda: nn.Linear(4, 2)).visit_memory)
    # What autograd saves for the backward pass of a visit has no weights of the body either.
    wide = nn.Sequential(nn.Linear(WIDTH, 2000), nn.Identity(), nn.Linear(2000, WIDTH))
    needs = [
        made(lambda body=body: Tuned(body), engine="vector").visit_memory.activations
        for body in (BODY, wide)
    ]
    assert needs[1] - needs[0] < 4 * 2000 * WIDTH  # one of the two matrices
    assert "frozen parameters" in federation._repr_html_()
    assert "frozen parameters" in federation.ensemble._repr_html_()


def test_predictions_modules_and_sizes():
    federation = made()
    federation.train(2)
    ensemble, x = federation.ensemble, examples().x_test
    assert ensemble.frozen_bytes == 4 * FROZEN
    assert ensemble.prediction_bytes == 2 * 4 * TRAINED
    members = torch.stack([ensemble.module(mode)(x).softmax(-1) for mode in range(2)])
    torch.testing.assert_close(ensemble.predict(x).members, members)
    module = ensemble.module(0)
    with torch.no_grad():
        module.body[0].weight.zero_()  # a copy, as the user may train it further
    torch.testing.assert_close(ensemble.predict(x).members, members)


@pytest.mark.parametrize("average", ["none", "ema", "snapshots"])
def test_a_saved_federation_continues_bit_for_bit(tmp_path, average):
    federation = made(with_norm, average=average)
    federation.train(2)
    folder = federation.save(tmp_path / "run")
    loaded = fe.Federation.load(folder, model=with_norm, data=examples())
    for each in (federation, loaded):
        each.train(2)
    for name, value in federation.tensors().items():
        assert torch.equal(loaded.tensors()[name], value), name


def test_files_hold_frozen_parameters_once(tmp_path):
    federation = made(modes=4)
    federation.train(1)
    folder = federation.save(tmp_path / "run")
    tensors, _ = read_checkpoint(folder / "modes.safetensors")
    frozen = {name for name in tensors if "body" in name}
    assert frozen == {f"frozen/body.{name}" for name, _ in BODY.named_parameters()}
    checkpoint = max(folder.rglob("round-*.safetensors"))
    assert not any("body" in name for name in read_checkpoint(checkpoint)[0])
    assert checkpoint.stat().st_size < 4 * 4 * TRAINED + 3000


def test_an_ensemble_has_the_frozen_parameters_of_its_file(tmp_path):
    federation = made()
    federation.train(1)
    folder, x = federation.save(tmp_path / "run"), examples().x_test
    expected = federation.predict(x).members

    def random_body():
        return Tuned(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

    for model in (Tuned, changed(), random_body):
        loaded = fe.load_ensemble(folder, model=model)
        assert torch.equal(loaded.predict(x).members, expected)
        loaded.export(tmp_path / "again.pt2")  # compares its predictions


def test_another_body_cannot_continue_a_training(tmp_path):
    federation = made()
    federation.train(1)
    folder = federation.save(tmp_path / "run")
    with pytest.raises(StoreError, match=r"other frozen parameters .* Build the model with"):
        fe.Federation.load(folder, model=changed(), data=examples())
    # A processor may round a computed parameter in another way.
    fe.Federation.load(folder, model=changed(1 + 1e-7), data=examples())


def as_earlier(federation):
    """The tensors of a checkpoint as earlier versions wrote it: frozen parameters are buffers."""
    model = federation.model

    def widen(values):
        total = model.buffer_layout.total
        copies = values.shape[-1] // total if total else 1
        parts = values.reshape(*values.shape[:-1], copies, total)
        named = model.buffer_layout.unflatten(parts)
        frozen = {
            name: value.expand(*parts.shape[:-1], *value.shape)
            for name, value in model.frozen.items()
        }
        return model.earlier_buffers.flatten({**named, **frozen}).flatten(-2)

    tensors = federation.checkpoint_tensors()
    del tensors["frozen/fingerprint"]
    return {
        name: widen(value) if name.endswith(("buffers", "statistics")) else value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(
    ("algorithm", "average"),
    [("fedavg", "none"), ("fedavg", "snapshots"), ("fedavg", "swag"), ("ditto", "ema")],
)
def test_checkpoints_of_earlier_versions_continue(algorithm, average):
    options = {"algorithm": {"name": algorithm, "lr": 0.2}, "average": average}
    federation, again = made(with_norm, **options), made(with_norm, **options)
    federation.train(2)
    earlier = as_earlier(federation)
    assert earlier["buffers"].shape == (2, 2 * WIDTH + FROZEN)
    again.restore(earlier, 2)
    for each in (federation, again):
        each.train(1)
    for name, value in federation.tensors().items():
        assert torch.equal(again.tensors()[name], value), name


def test_earlier_checkpoints_without_other_buffers_continue():
    federation, again = made(), made()
    federation.train(1)
    again.restore(as_earlier(federation), 1)
    assert again.state.buffers.shape == (2, 0)
    assert torch.equal(again.state.modes["theta"], federation.state.modes["theta"])


def test_an_earlier_checkpoint_with_another_body_says_so():
    federation = made()
    federation.train(1)
    earlier = as_earlier(federation)
    other = made(changed())
    before = other.state
    with pytest.raises(StoreError, match=r"other values of the parameter 'body.2.bias'"):
        other.restore(earlier, 1)
    assert other.state is before


def test_modes_in_files_of_earlier_versions_load(tmp_path):
    federation = made(with_norm, average="snapshots")
    federation.train(3)
    folder, x = federation.save(tmp_path / "run"), examples().x_test
    file, ensemble = folder / "modes.safetensors", federation.ensemble
    expected = ensemble.predict(x).members

    def rewrite(difference=0.0):
        tensors, facts = read_checkpoint(original)
        frozen = {n.removeprefix("frozen/"): t for n, t in tensors.items() if "frozen/" in n}
        layout = ensemble.model.buffer_layout
        for mode in range(2):
            tensors |= {
                f"{mode}/{name}": value + mode * difference for name, value in frozen.items()
            }
            named = layout.unflatten(tensors[f"{mode}/predictor_buffers"])
            samples = len(tensors[f"{mode}/predictor_buffers"])
            named |= {name: value.expand(samples, *value.shape) for name, value in frozen.items()}
            wide = ensemble.model.earlier_buffers.flatten(named)
            tensors[f"{mode}/predictor_buffers"] = wide
        kept = {name: value for name, value in tensors.items() if "frozen/" not in name}
        write_checkpoint(file, kept, facts)

    original = Path(tmp_path / "original.safetensors")
    original.write_bytes(file.read_bytes())
    rewrite()
    assert torch.equal(fe.load_ensemble(folder, model=with_norm).predict(x).members, expected)
    rewrite(1.0)
    with pytest.raises(InputError, match=r"its modes have parameters 'body.0.weight' of their own"):
        fe.load_ensemble(folder, model=with_norm)


def test_random_parameters_without_gradient_stay_with_each_mode():
    """As for randomized priors: nobody else knows their values, so they travel as before."""

    def model():
        return nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 2))

    federation = made(model)
    assert federation.model.frozen == {} and federation.state.buffers.shape == (2, 40)
    assert not torch.equal(*federation.state.buffers)
    before = federation.state.buffers.clone()
    federation.train(2)
    assert torch.equal(federation.state.buffers, before)


def test_a_factory_must_repeat_frozen_parameters():
    calls = []

    def model():
        calls.append(1)
        net = Tuned()
        with torch.no_grad():
            net.body[0].bias += max(0, len(calls) - 12)
        return net

    with pytest.raises(InputError, match=r"'body.0.bias'.* other values in some calls"):
        made(model, modes=50)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_forward_pass_must_not_change_frozen_parameters(engine):
    class Counting(Tuned):
        def forward(self, x):
            self.body[0].bias.add_(1)
            return super().forward(x)

    with pytest.raises(InputError, match=r"changes its parameter 'body.0.bias'.* as a buffer"):
        made(Counting, engine=engine)


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "scaffold", "local"])
@pytest.mark.parametrize("personal", [None, ["head.*"]])
def test_personal_models_have_the_frozen_parameters_too(algorithm, personal):
    if personal and algorithm in ("ditto", "local"):
        pytest.skip("these have personal models of their own")
    states = []
    for engine in ("loop", "vector"):
        federation = made(
            with_norm,
            {"name": algorithm, "lr": 0.1},
            personal=personal,
            engine=engine,
            dtype=torch.float64,
        )
        federation.train(2)
        theta, buffers = federation.personal_models([0, 2])
        assert theta.shape == (2, 2, TRAINED + 2 * WIDTH) and buffers.shape == (2, 2, 2 * WIDTH)
        module = federation.personal_ensemble(2).module(0)
        assert torch.equal(module.body[0].weight, BODY[0].weight.double())
        state = federation.state
        states.append({**state.modes, "statistics": state.buffers, "own": theta, "their": buffers})
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-9, msg=name)


def test_shared_patterns_may_name_frozen_parameters():
    plain = made(seed=3)
    shared = made(seed=3, shared=["body.*", "first.*"])
    for each in (plain, shared):
        each.train(1)
    first = shared.model.theta_layout.unflatten(shared.state.modes["theta"])["first.weight"]
    assert torch.equal(*first)
    with pytest.raises(InputError, match="boby"):
        made(shared=["boby.*"])


def test_server_side_distillation_reads_the_frozen_parameters():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    data = fe.FederatedData.from_arrays(examples().x, examples().y, [10, 20, 30], x_server=x)
    settings = {"modes": 2, "strata": 1, "batch_size": 5}
    federation = fe.Federation(Tuned, data, {"name": "fedsdd", "lr": 0.1}, **settings)
    federation.train(2)
    assert all(value.isfinite().all() for value in federation.state.modes.values())


def test_ranks_with_different_bodies_stop():
    class Ranks(ProcessGroup):
        hosts = ("here", "there")

        def __init__(self):
            pass

    reports = [
        {"frozen": made(model).model.frozen_fingerprint.tolist()} for model in (Tuned, changed())
    ]
    _require_same_frozen([reports[0], reports[0]], Ranks())
    with pytest.raises(InputError, match=r"rank 1 on there have built other values"):
        _require_same_frozen(reports, Ranks())


@pytest.mark.parametrize("name", ["modes.pt2", "modes.onnx"])
def test_exported_files_have_one_copy(tmp_path, name):
    if name.endswith("onnx"):
        pytest.importorskip("onnxscript")
    wide = nn.Sequential(nn.Linear(WIDTH, 400), nn.Tanh(), nn.Linear(400, WIDTH))
    sizes = []
    for modes in (1, 3):
        ensemble = made(lambda: Tuned(wide), modes=modes).ensemble
        ensemble.export(tmp_path / name)  # compares its predictions
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[1] - sizes[0] < 4 * 2 * 400 * WIDTH / 2 < sizes[0]


class Quantized(nn.Module):
    """A frozen layer of 8-bit integers with one scale per row, between trained layers."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        weight = BODY[0].weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        integers = (weight / scale).round().to(torch.int8)
        self.integers = nn.Parameter(integers, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        weight = self.integers.to(self.scale.dtype) * self.scale
        return self.head(torch.tanh(nn.functional.linear(self.first(x), weight)))


def test_a_body_of_integers(tmp_path):
    runs = []
    for engine in ("loop", "vector"):
        federation = made(Quantized, engine=engine, dtype=torch.float64)
        federation.train(2)
        runs.append(federation)
    assert runs[1].engine.stacked and set(runs[1].model.frozen) == {"integers", "scale"}
    assert runs[1].model.frozen_bytes == WIDTH * WIDTH + 8 * WIDTH
    theta = [run.state.modes["theta"] for run in runs]
    torch.testing.assert_close(*theta, rtol=0, atol=1e-12)
    folder, x = runs[0].save(tmp_path / "run"), examples().x_test
    expected = runs[0].predict(x).members
    assert torch.equal(fe.load_ensemble(folder, model=Quantized).predict(x).members, expected)
    tensors, facts = read_checkpoint(folder / "modes.safetensors")
    assert tensors.pop("frozen/integers").dtype == torch.int8
    write_checkpoint(folder / "modes.safetensors", tensors, facts)  # as earlier versions did
    assert torch.equal(fe.load_ensemble(folder, model=Quantized).predict(x).members, expected)
