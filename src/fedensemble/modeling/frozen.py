"""Frozen parameters, such as those of a pretrained body: one copy for all modes and clients.

They never travel: each process builds them with the model. Their fingerprint tells whether two
processes, or a checkpoint and the process that resumes it, have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import InputError, StoreError
from ..flat_params import Tree
from ..runtime.torch_compat import version

if TYPE_CHECKING:
    from .functional_model import FunctionalModel

# A second seed of the factory, to see which values depend on the seed.
_OTHER_SEED = 1
# Fingerprints may differ by this much, relative to the sum of absolute values: two processors may
# round a computed parameter, such as a table of sines, in different ways.
_TOLERANCE = 1e-6
# How the names of tensors end that hold buffers, in checkpoints of earlier versions.
_BUFFERS = ("buffers", "statistics")
_CHUNK = 1 << 20  # numbers that are converted to float64 at a time


def find_frozen(template: nn.Module, build: Callable[[int], nn.Module]) -> set[str]:
    """Names of parameters that are not trained, and that each call of the factory repeats.

    Args:
        template: a new module, on the CPU.
        build: makes another one from a seed.
    """
    untrained = {n: p for n, p in template.named_parameters() if not p.requires_grad}
    if not untrained:
        return set()
    other = dict(build(_OTHER_SEED).named_parameters())
    return {n for n, p in untrained.items() if n in other and torch.equal(p, other[n])}


def check_repeated(frozen: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raises if a newly built model has other values than the frozen parameters."""
    own = dict(model.named_parameters())
    for name, value in frozen.items():
        if not torch.equal(value, own[name].to(value.device)):
            raise InputError(
                f"model() gives its parameter '{name}', which has requires_grad=False, other "
                "values in some calls than in others. Frozen parameters are shared by all modes: "
                "give them the same values in each call, or register them as buffers, of which "
                "each mode has its own."
            )


def write_counts(frozen: Mapping[str, Tensor]) -> list[int]:
    """How often each frozen parameter was written to."""
    return [version(value) for value in frozen.values()]


def check_unchanged(
    frozen: Mapping[str, Tensor], counts: list[int], after: Mapping[str, Tensor | None]
) -> None:
    """Raises if a forward pass changed a frozen parameter, which would change it for everybody.

    Args:
        counts: `write_counts` before the pass.
        after: what the module has after it.
    """
    for (name, value), before in zip(frozen.items(), counts, strict=True):
        if after[name] is not value or version(value) != before:
            raise InputError(
                f"The model changes its parameter '{name}' in the forward pass, and with "
                "requires_grad=False it is frozen: all modes and clients share it. Register what "
                "changes as a buffer."
            )


def is_earlier(
    tensors: Mapping[str, Tensor], model: FunctionalModel, name: str = "buffers"
) -> bool:
    """True for tensors of an earlier version, whose buffers held frozen parameters as well.

    Args:
        name: of buffers [..., R] among the tensors.
    """
    found, earlier = tensors.get(name), model.earlier_buffers.total
    return found is not None and model.buffer_layout.total != earlier == found.shape[-1]


def read_earlier(
    tensors: Mapping[str, Tensor], model: FunctionalModel, name: str = "buffers"
) -> Tree:
    """The tensors of an earlier version without frozen parameters.

    They are dropped from all vectors of buffers, in averages and client state as well.

    Args:
        name: of buffers [K, R] among the tensors, whose frozen parameters must be the model's.
    """
    layout, earlier = model.buffer_layout, model.earlier_buffers
    found = earlier.unflatten(tensors[name])
    for each, value in model.frozen.items():
        if each in found and not bool((found[each] == value.to(found[each].device)).all()):
            raise StoreError(
                f"The checkpoint was written with other values of the parameter '{each}', which "
                "has requires_grad=False, than model() gives it now. Build the model that was "
                "trained; if model() draws the parameter at random, register it as a buffer."
            )

    def drop(values: Tensor) -> Tensor:
        each = values.reshape(*values.shape[:-1], -1, earlier.total)
        kept = layout.flatten(earlier.unflatten(each)) if layout.names else each[..., :0]
        return kept.flatten(-2)

    def holds_buffers(each: str, values: Tensor) -> bool:
        size = values.shape[-1] if values.dim() else 0
        return each.endswith(_BUFFERS) and size > 0 and size % earlier.total == 0

    return {n: drop(t) if holds_buffers(n, t) else t for n, t in tensors.items()}


def fingerprint(frozen: Tree) -> Tensor:
    """Three numbers for each frozen parameter, float64 [T, 3] on the CPU.

    They are the sum of its values, their sum with growing weights, so that an exchange of values
    shows, and the sum of their absolute values.
    """
    rows = [_three_sums(value) for value in frozen.values()]
    return torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.float64)


def _three_sums(value: Tensor) -> Tensor:
    numbers = (torch.view_as_real(value) if value.is_complex() else value).flatten()
    total = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(numbers), _CHUNK):
        part = numbers[start : start + _CHUNK].double()
        place = torch.arange(start, start + len(part), dtype=torch.float64, device=part.device)
        sums = part.sum(), (part * place).sum() / len(numbers), part.abs().sum()
        total += torch.stack(sums).cpu()
    return total


def same_fingerprint(one: Tensor, other: Tensor) -> bool:
    """True if two fingerprints are those of the same parameters, up to rounding."""
    if one.shape != other.shape:
        return False
    scale = torch.maximum(one[:, 2:], other[:, 2:])
    return bool(((one - other).abs() <= _TOLERANCE * scale).all())
