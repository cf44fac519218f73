"""Each private name of torch is there, does what it is used for, and has a fallback."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedensemble
from fedensemble.runtime import torch_compat
from fedensemble.runtime.torch_compat import MissingTorchName

ROOT = Path(fedensemble.__file__).parent


def test_unwrap():
    seen = []

    def function(x):
        seen.append(torch_compat.unwrap(x))
        return x.sum()

    x = torch.ones(3, 2)
    torch.func.vmap(torch.func.grad(function))(x)
    assert seen[0].shape == (3, 2)
    assert torch_compat.unwrap(x) is x


def test_is_batched():
    seen = []
    torch.func.vmap(lambda x: (seen.append(torch_compat.is_batched(x)), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not torch_compat.is_batched(torch.ones(2))


def test_host_array():
    keys = torch.tensor([-1, 5])
    words = torch_compat.host_array(keys)
    assert words.tolist() == [2**64 - 1, 5]
    assert torch_compat.host_array(torch.tensor(5)) is None  # NumPy would compute with scalars
    assert torch_compat.host_array(torch.ones(2)) is None
    assert torch_compat.host_array(torch.ones(2, dtype=torch.int64, device="meta")) is None
    seen = []
    torch.func.vmap(lambda key: (seen.append(torch_compat.host_array(key[None])), key)[1])(keys)
    with torch.overrides.TorchFunctionMode():
        seen.append(torch_compat.host_array(keys))
    assert seen == [None, None]


def test_without_the_names_of_functorch_no_array_is_read(monkeypatch):
    def missing(root, path):
        raise MissingTorchName(path)

    torch_compat._conversion_checks.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch_compat, "_find", missing)
        assert torch_compat.host_array(torch.tensor([1])) is None
    torch_compat._conversion_checks.cache_clear()
    assert torch_compat.host_array(torch.tensor([1])) is not None


def test_is_transformed():
    seen = []

    def see(x):
        seen.append(torch_compat.is_transformed(x))
        return x

    torch.func.vmap(see)(torch.ones(2))
    torch.func.grad(see)(torch.ones(()))
    assert seen == [True, True]
    assert not torch_compat.is_transformed(torch.ones(2))


def test_without_function_modes():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        with torch_compat.without_function_modes():
            torch.ones(1).sum()
        assert not seen
        torch.ones(1).sum()
    assert seen


def test_storage_id_and_reference():
    x = torch.ones(4)
    assert torch_compat.storage_id(x) == torch_compat.storage_id(x[2:])
    other = torch.ones(4)
    assert torch_compat.storage_id(x) != torch_compat.storage_id(other)
    reference = torch_compat.storage_reference(other)
    assert not reference.expired()
    del other
    assert reference.expired()


def test_version():
    x = torch.zeros(2)
    before = torch_compat.version(x)
    x.add_(1)
    assert torch_compat.version(x) == before + 1
    with torch.inference_mode():
        assert torch_compat.version(torch.zeros(1)) == 0


def test_dispatch_mode_sees_operators():
    seen = []

    class Mode(torch_compat.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).clone()
    assert torch_compat.aten("clone") in seen


def test_in_backward():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch_compat.in_backward()))
    assert not torch_compat.in_backward()
    y.backward()
    assert seen == [True]


def test_weight_norm_is_what_the_parametrization_calls(monkeypatch):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), dim=0)
    v, g = torch.full((2, 3), 2.0), torch.ones(2, 1)
    torch.testing.assert_close(torch_compat.weight_norm()(v, g, 0), v / 12**0.5)
    calls = []
    monkeypatch.setattr(torch, "_weight_norm", lambda v, g, dim: calls.append(dim) or v)
    assert torch.equal(layer.weight, layer.parametrizations.weight.original1)
    assert calls == [0]
    monkeypatch.delattr(torch, "_weight_norm")
    assert torch_compat.weight_norm() is None


def test_module_tensors_can_be_replaced():
    layer = nn.BatchNorm1d(2)
    parameters, buffers = torch_compat.module_tensors(layer)
    parameters["weight"] = torch.full((2,), 3.0)  # no nn.Parameter
    buffers["running_mean"] = torch.full((2,), 5.0)
    assert layer.weight.tolist() == [3.0, 3.0]
    assert layer.running_mean.tolist() == [5.0, 5.0]


def test_forward_hooks_are_found():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert not torch_compat.has_forward_hooks(model)
    handle = model[1].register_forward_hook(lambda *args: None)
    assert torch_compat.has_forward_hooks(model)
    handle.remove()
    handle = model[0].register_forward_pre_hook(lambda *args: None)
    assert torch_compat.has_forward_hooks(model)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert torch_compat.has_forward_hooks(model)
    finally:
        handle.remove()
    assert not torch_compat.has_forward_hooks(model)


def test_apply_to_tensors():
    layer = torch_compat.apply_to_tensors(nn.BatchNorm1d(2), lambda t: t + 1)
    assert layer.weight.tolist() == [2.0, 2.0]
    assert layer.running_mean.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("missing", [False, True])
def test_norm_layers(missing, monkeypatch):
    if missing:
        monkeypatch.delattr(nn.modules.batchnorm, "_NormBase")
        monkeypatch.delattr(nn.modules.batchnorm, "_BatchNorm")
    norms, batch_norms = torch_compat.norm_layers(), torch_compat.batch_norm_layers()
    assert isinstance(nn.BatchNorm2d(1), norms)
    assert isinstance(nn.InstanceNorm1d(1), norms)
    assert isinstance(nn.BatchNorm3d(1), batch_norms)
    assert not isinstance(nn.InstanceNorm1d(1), batch_norms)
    assert not isinstance(nn.GroupNorm(1, 1), norms)


def test_a_missing_name_is_reported():
    with pytest.raises(MissingTorchName, match=r"torch .* has no torch\._C\._no_such_name"):
        torch_compat._find(torch._C, "_no_such_name")


WITHOUT = """
import torch
from torch.utils import _python_dispatch
{delete}
from fedensemble import FedAvg
from fedensemble.testing.toy_problems import small_federation, train
for engine in ("loop", "vector"):
    federation = small_federation(FedAvg(), engine, 2, 2)
    train(federation, 1)
print(federation.engine.notes)
"""


@pytest.mark.parametrize(
    "delete",
    [
        "del torch._C._functorch.is_batchedtensor",
        "del torch._C._current_graph_task_id",
    ],
)
def test_training_works_without_a_private_name(delete):
    """With `vmap` if stacking needs the name; in a new process, because torch is altered."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT.format(delete=delete)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert ("using vmap" in done.stdout) == ("batched" not in delete)


def private_names(path):
    """Private attributes of torch in a file, as dotted names with their line."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield node.lineno, ".".join(parts)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            dunder = node.attr.startswith("__")
            if isinstance(root, ast.Name) and root.id in ("torch", "nn", "F") and not dunder:
                yield node.lineno, ast.unparse(node)


def test_no_other_module_uses_a_private_name_of_torch():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in ROOT.rglob("*.py")
        if path.name != "torch_compat.py"
        for line, name in private_names(path)
    ]
    assert not found
