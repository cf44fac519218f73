"""MaxPool2d on a CPU equals torch's, with ties and cropped edges."""

import pytest
import torch
import torch.nn.functional as F

from fedensemble.engines.kernels.cpu_max_pool import MaxPool2d


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 2, 7, 8), (3, 1, 3, 11)])
def test_as_torch(size, shape):
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 3, shape, generator=generator).double()  # many ties
    for x in (few, torch.randn(shape, generator=generator, dtype=torch.float64)):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        got, expected = MaxPool2d.apply(ours, size), F.max_pool2d(theirs, size)
        grad_output = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        got.backward(grad_output)
        expected.backward(grad_output)
        assert torch.equal(got, expected)
        assert torch.equal(ours.grad, theirs.grad)


def test_nan_is_passed_on():
    x = torch.zeros(1, 1, 2, 2)
    x[0, 0, 1, 0] = float("nan")
    assert MaxPool2d.apply(x, 2).isnan().all()


def test_may_be_written_into():
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64).requires_grad_()
    grads = [
        torch.autograd.grad(pool(x, 2).relu_().sum(), x)[0]
        for pool in (MaxPool2d.apply, F.max_pool2d)
    ]
    assert torch.equal(*grads)
