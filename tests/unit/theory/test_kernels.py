"""The empirical NTK both ways and by autograd; closed forms against integrals and wide networks."""

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn

from fedensemble.errors import InputError
from fedensemble.models import CNN, LSTM, MLP, Wide
from fedensemble.theory.infinite_width import relu_kernels
from fedensemble.theory.tangent_kernel import ntk


def cases(dtype):
    torch.manual_seed(0)
    return {
        "mlp": (MLP([3], 2, dropout=0.5).to(dtype), torch.randn(5, 3, dtype=dtype)),
        "cnn": (CNN((1, 16, 16), 3).to(dtype), torch.randn(3, 1, 16, 16, dtype=dtype)),
        "lstm": (LSTM(5, hidden=4).to(dtype), torch.randint(0, 5, (3, 4))),
    }


def by_autograd(model, x, x2):
    """Gradients of each output of a whole batch, one after another."""
    model.eval()

    def rows(inputs):
        out = model(inputs).reshape(-1)
        grads = [torch.autograd.grad(o, list(model.parameters()), retain_graph=True) for o in out]
        return torch.stack([torch.cat([g.flatten() for g in gs]) for gs in grads])

    return rows(x) @ rows(x2).T


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_both_ways_agree_with_autograd(name, dtype, tolerance):
    model, x = cases(dtype)[name]
    model.train()
    expected = by_autograd(model, x, x[:2])
    size = float(expected.abs().max())
    model.train()
    for options in ({}, {"method": "products"}, {"memory": 1e-9}):
        found = ntk(model, x, x[:2], **options)
        assert float((found - expected).abs().max()) <= tolerance * max(1, size), options
    assert model.training  # it is evaluated in eval mode and left as it was
    for options in ({}, {"method": "products"}, {"memory": 1e-9}):  # symmetric blocks
        assert float((ntk(model, x, **options)[:, : found.shape[1]] - expected).abs().max()) <= (
            tolerance * max(1, size)
        )


def test_only_trainable_parameters_count():
    model = nn.Linear(2, 1).double()
    model.bias.requires_grad_(False)
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]]).double()
    assert torch.allclose(ntk(model, x), x @ x.T)
    model.weight.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable"):
        ntk(model, x)
    with pytest.raises(InputError, match="method"):
        ntk(model, x, method="magic")


def test_one_step_of_gradient_descent_follows_the_kernel():
    """f(w - lr J^T r) = f(w) - lr Theta r + O(lr^2)."""
    torch.manual_seed(0)
    model, x = Wide([2], 1, width=50).double(), torch.randn(6, 2).double()
    kernel, before = ntk(model, x), model(x).detach()
    residual, lr = before - 1, 1e-6
    grads = torch.autograd.grad(((model(x) - 1) ** 2).sum() / 2, list(model.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.sub_(lr * grad)
    assert torch.allclose((model(x) - before) / lr, -kernel @ residual, atol=1e-3)


@pytest.mark.parametrize("angle", [0.0, 0.4, 1.5, 2.6])
def test_the_first_layer_is_the_integral_over_gaussian_weights(angle):
    """E relu(u) relu(v) and E relu'(u) relu'(v), integrated numerically in polar coordinates."""
    x = torch.tensor([[1.0, 0.0], [2 * np.cos(angle), 2 * np.sin(angle)]]).double()
    kernels = relu_kernels(x, depth=1, weight_scale=1.3, bias_scale=0.0)
    a, b = 1.3 / 2**0.5, 2 * 1.3 / 2**0.5  # sizes of the two preactivations

    def relu(value):
        return max(value, 0.0)

    points = [angle - np.pi / 2, np.pi / 2]
    product, _ = integrate.quad(
        lambda t: relu(np.cos(t)) * relu(np.cos(t - angle)) / np.pi, -np.pi, np.pi, points=points
    )
    both, _ = integrate.quad(
        lambda t: float(np.cos(t) > 0 and np.cos(t - angle) > 0) / (2 * np.pi),
        -np.pi,
        np.pi,
        points=points,
        limit=200,
    )
    nngp = 1.3**2 * a * b * product
    linear = a * b * np.cos(angle)
    assert float(kernels.nngp[0, 1]) == pytest.approx(nngp, abs=1e-7)
    assert float(kernels.ntk[0, 1]) == pytest.approx(nngp + 1.3**2 * both * linear, abs=1e-6)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_closed_forms_are_the_mean_over_wide_networks(depth):
    width, count = 400, 60
    torch.manual_seed(depth)
    x, x2 = torch.randn(3, 4).double(), torch.randn(2, 4).double()
    options = {"depth": depth, "weight_scale": 1.2, "bias_scale": 0.3}
    kernels = relu_kernels(x, x2, **options)
    if depth == 0:
        linear = nn.Linear(4, 1).double()
        scaled = 1.2**2 * x @ x2.T / 4 + 0.3**2
        assert linear is not None and torch.allclose(kernels.ntk, scaled)
        assert torch.equal(kernels.ntk, kernels.nngp)
        return
    outputs, tangents = [], []
    for index in range(count):
        model = Wide([4], 40, width=width, **options).double()
        with torch.no_grad():  # 40 outputs are almost independent samples of the process
            outputs.append((model(x), model(x2)))
        if index < 12:
            tangents.append(ntk(Wide([4], 1, width=width, **options).double(), x, x2))
    products = torch.cat([a[:, None] * b[None] for a, b in outputs], -1)
    for found, expected in ((products, kernels.nngp), (torch.stack(tangents, -1), kernels.ntk)):
        error = found.std(-1) / found.shape[-1] ** 0.5
        # plus the bias of finite width, of order 1 / width
        assert ((found.mean(-1) - expected).abs() <= 4.5 * error + 0.01).all()


def test_kernels_of_given_inputs():
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    all_kernels = relu_kernels(x, depth=2)
    assert torch.allclose(relu_kernels(x[:1], x[1:], depth=2).ntk, all_kernels.ntk[:1, 1:])
    assert torch.linalg.eigvalsh(all_kernels.ntk)[0] > 0
    with pytest.raises(InputError, match="depth"):
        relu_kernels(x, depth=-1)
    with pytest.raises(InputError, match="one size"):
        relu_kernels(x, x[:, 0])
