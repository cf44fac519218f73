"""The local steps of a block: each has its own examples and its own key of random layers."""

from types import SimpleNamespace

import pytest
import torch

from fedensemble import FederatedData, prng
from fedensemble.engines.local.block import Minibatches


@pytest.mark.parametrize("visits", [(), (3,)], ids=["one visit", "three visits"])
def test_each_step_has_its_own_examples_and_key(visits):
    data = FederatedData.from_clients([(torch.arange(12.0)[:, None], torch.arange(12) % 2)])
    index = torch.arange(12).reshape(4, 3)[:, None].expand(4, *visits or (1,), 3)
    index = index if visits else index[:, 0]
    model_key = torch.arange(3) * 17 if visits else torch.tensor(17)
    seen = []

    def gradient(at, buffers, x, y, weight, key):
        seen.append((x, key))

    inputs = SimpleNamespace(
        batch_index=index,
        weight=torch.ones_like(index, dtype=torch.bool),
        model_key=model_key,
        target_noise={},
    )
    steps = Minibatches(data, torch.float32, gradient, inputs, ragged=False)
    for step in (0, 3, 1):
        steps.gradient(step, torch.zeros(1), torch.zeros(0))
        x, key = seen.pop()
        assert torch.equal(x.squeeze(-1).long(), index[step])
        assert torch.equal(key, torch.as_tensor(prng.fold_in(model_key, step)))
