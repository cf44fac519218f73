"""`Ensemble.distill`: what a student is, for all kinds of models, and mistakes."""

import numpy as np
import pytest
import torch
from scipy import special
from tests.unit.export.test_models import assert_agrees, ensemble, inputs_for, registered
from torch import nn

import fedensemble as fe
from fedensemble import DivergedError, InputError, prng
from fedensemble.data.normalize import Standardise
from fedensemble.distillation.distill import DistillSettings, distill
from fedensemble.export import torch_program
from fedensemble.testing.toy_problems import FEATURES, classification, numbers
from fedensemble.uncertainty import Calibration, CalibrationSettings


def linear(**options):
    return ensemble(lambda: nn.Linear(FEATURES, 3), (FEATURES,), modes=4, **options)


X = numbers(40, FEATURES).float()


def test_one_step_is_a_step_of_adam_on_the_soft_cross_entropy():
    teacher = linear(standardise=Standardise((1.0,), (2.0,)))
    made = distill(teacher, X, DistillSettings(epochs=1, batch_size=40, lr=0.1, mixup=False))
    target = teacher.predict(X)
    cross_entropy = [-(target.mean * mode.log()).sum(-1).mean() for mode in target.modes]
    assert made.start == int(torch.stack(cross_entropy).argmin())
    student = teacher.module(made.start)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.1)
    loss = -(target.mean * student((X - 1) / 2).log_softmax(-1)).sum(-1).mean()
    loss.backward()
    optimizer.step()
    assert made.losses == pytest.approx([loss.item()], rel=1e-6)
    for ours, theirs in zip(
        made.ensemble.module(0).parameters(), student.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_all_steps_are_those_of_a_loop():
    """Batches of the given size, a cosine rate, and the temperature of the formula."""
    teacher = linear(standardise=None)
    settings = DistillSettings(
        kind="dirichlet", epochs=3, batch_size=16, lr=0.05, temperature=3.0, mixup=False
    )
    made = distill(teacher, X, settings)
    members = teacher.predict(X).members
    student = teacher.module(made.start)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.05)
    key, step = prng.key(0, "distillation"), 0
    for epoch in range(3):
        order = prng.permutation(prng.fold_in(key, epoch, 0), 40)
        losses = []
        for rows in (order[:16], order[16:32]):  # 8 of the 40 rows are left over
            progress = step / 6
            temperature = 3.0 - 2.0 * min(max(2 * progress - 0.5, 0), 1)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * 0.5 * (1 + np.cos(np.pi * progress))
            drawn = (members[:, rows].log() / temperature).softmax(-1)
            drawn = (1 - 1e-4) * drawn + 1e-4 / 3
            alpha = (student(X[rows]) / temperature).exp()
            loss = -torch.distributions.Dirichlet(alpha).log_prob(drawn).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
        assert made.losses[epoch] == pytest.approx(np.mean(losses), rel=1e-4)
    torch.testing.assert_close(made.ensemble.module(0).weight, student.weight, rtol=1e-4, atol=1e-5)


def test_a_student_is_an_ensemble_of_one_and_comes_closer_to_its_teacher():
    teacher = linear()
    state = torch.random.get_rng_state()
    student = teacher.distill(X, epochs=30, lr=0.02)
    assert torch.equal(state, torch.random.get_rng_state())
    assert len(student) == 1 and student.prediction_models == 1 and student.input_shape == (4,)
    assert len(teacher) == 4  # unchanged
    target, found = teacher.predict(X), student.predict(X)
    assert not found.mutual_information.any()
    distance = (found.mean - target.mean).abs().mean()
    assert float(distance) < 0.3 * min(float((m - target.mean).abs().mean()) for m in target.modes)
    assert torch.equal(student.theta, teacher.distill(X, epochs=30, lr=0.02).theta)
    assert not torch.equal(student.theta, teacher.distill(X, epochs=30, lr=0.02, seed=1).theta)


def test_a_dirichlet_student_has_mutual_information():
    teacher = linear()
    student = teacher.distill(X, kind="dirichlet", epochs=60, lr=0.02)
    found = student.predict(X)
    alpha = student.outputs(X)[0, 0].double().exp().numpy()
    mean = alpha / alpha.sum(-1, keepdims=True)
    expected = (
        mean * (special.digamma(alpha.sum(-1, keepdims=True) + 1) - special.digamma(alpha + 1))
    ).sum(-1)
    np.testing.assert_allclose(found.mean, mean, atol=1e-6)
    np.testing.assert_allclose(found.member_entropy, expected, atol=1e-5)
    information = special.entr(mean).sum(-1) - expected
    np.testing.assert_allclose(found.mutual_information, information, atol=1e-5)
    ours, theirs = found.mutual_information.mean(), teacher.predict(X).mutual_information.mean()
    assert 0.3 * theirs < ours < 3 * theirs
    assert float((found.mean - teacher.predict(X).mean).abs().mean()) < 0.1


@pytest.mark.parametrize("kind", ["plain", "dirichlet"])
def test_students_are_exported(kind, tmp_path):
    pytest.importorskip("onnxruntime")
    from tests.unit.export.test_models import run_onnx

    student = linear().distill(X, kind=kind, epochs=5)
    student.export(tmp_path / "m.onnx")
    student.export(tmp_path / "m.pt2")
    assert_agrees(student, run_onnx(tmp_path / "m.onnx"))
    assert_agrees(student, torch_program.load((tmp_path / "m.pt2").read_bytes()))


class Noisy(nn.Module):
    """BatchNorm and dropout, which are in train mode while the student learns."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3)
        )

    def forward(self, x):
        return self.layers(x)


def test_running_statistics_follow_the_inputs_of_the_server():
    teacher = ensemble(Noisy, (FEATURES,), modes=3)
    student = teacher.distill(X + 5, epochs=60, mixup=False)
    with torch.no_grad():
        first = student.module(0).layers[0](X + 5)
    mean = student.module(0).layers[1].running_mean
    torch.testing.assert_close(mean, first.mean(0), atol=0.3, rtol=0.1)
    assert torch.equal(student.theta, teacher.distill(X + 5, epochs=60, mixup=False).theta)


@pytest.mark.parametrize("name", ["lstm", "rbf"])
def test_tokens_and_regression(name):
    teacher = registered(name)
    x = inputs_for(teacher, 20)
    student = teacher.distill(x, epochs=8, lr=0.01)
    target = teacher.predict(x)
    closest = min(float((mode - target.mean).abs().mean()) for mode in target.modes)
    assert float((student.predict(x).mean - target.mean).abs().mean()) < closest


def test_another_architecture_and_predictors_of_an_average():
    teacher = linear(samples=3)
    wide = teacher.distill(
        X,
        epochs=60,
        lr=0.02,
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    assert isinstance(wide.module(0), nn.Sequential) and len(wide) == 1
    target = teacher.predict(X).mean
    assert float((wide.predict(X).mean - target).abs().mean()) < 0.05


def test_the_temperatures_of_a_calibrated_teacher_are_learned():
    teacher = linear()
    teacher.calibration = Calibration(
        CalibrationSettings(method="none"), 3, 4, 10, 1, place="mean", temperatures=(0.2,)
    )
    student = teacher.distill(X, epochs=80, lr=0.05)
    assert student.calibration is None
    assert float((student.predict(X).mean - teacher.predict(X).mean).abs().mean()) < 0.05


def test_mistakes():
    teacher = linear()
    with pytest.raises(InputError, match="predicts with one model"):
        teacher.select([1]).distill(X)
    with pytest.raises(InputError, match="this is regression"):
        registered("rbf").distill(numbers(5, 1), kind="dirichlet")
    with pytest.raises(InputError, match="at least 2 inputs; got 1"):
        teacher.distill(X[:1])
    with pytest.raises(InputError, match="shape"):
        teacher.distill(numbers(5, 7))
    with pytest.raises(InputError, match=r"returns shape \(1, 2\)"):
        teacher.distill(X, model=lambda: nn.Linear(4, 2))
    with pytest.raises(DivergedError, match="not finite in epoch"):
        teacher.distill(X, kind="dirichlet", lr=1e6)
    for wrong in (
        {"kind": "soft"},
        {"epochs": 0},
        {"batch_size": 0.5},
        {"lr": 0.0},
        {"temperature": -1.0},
        {"mixup": 1},
        {"kind": "dirichlet", "temperature": 0.5},
    ):
        with pytest.raises(InputError, match=r"distill\("):
            teacher.distill(X, **wrong)


def test_the_inputs_of_the_server_teach_as_they_are_stored():
    data = classification()
    federation = fe.Federation(lambda: nn.Linear(FEATURES, 3), data, modes=2, clients_per_round=4)
    federation.train(2)
    assert len(federation.ensemble.distill(data.x_server, epochs=2)) == 1
