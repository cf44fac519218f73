"""Joint visits: a client receives all K modes at once, and may train any of them.

IFCA's clients choose one of the modes, and FedEM's clients train all of them. An algorithm that
needs this sets `joint = True`. For its visits the K modes are one wide mode: parameters [1, K * P]
and running statistics [1, K * R], in which the vectors of the modes follow each other. Engines
train, send, average and count wide modes as they do others. The server takes the mean apart again,
and updates each mode by itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...errors import InputError, setting
from ...flat_params import Tree
from ..algorithm import Algorithm, algorithms
from ..attack import Attack
from ..schedule import Schedule, schedules
from ..types import Plan, RoundResult

# Uploads "trained_0", "trained_1", ... are 1 for the modes that the client trained and 0 for the
# others, whose change must be 0. Tensors of one value each, because these count as flags wherever
# uploads are shortened. Without them, every client trained all modes.
_TRAINED = "trained_{}"


def join_modes(tree: Tree) -> Tree:
    """The rows of K modes, [K, P] each, as one row, [1, K * P].

    >>> join_modes({"theta": torch.tensor([[1, 2], [3, 4]])})["theta"].tolist()
    [[1, 2, 3, 4]]
    """
    return {name: value.reshape(1, -1) for name, value in tree.items()}


def join_plan(plan: Plan) -> Plan:
    """The plan of joint visits: all of them train the one wide mode."""
    return plan._replace(mode=torch.zeros_like(plan.mode))


def trained_flags(chosen: Tensor) -> Tree:
    """The uploads that say which modes a client trained, [..., 1] each.

    Args:
        chosen: 1 for the modes that were trained, else 0, [..., K].
    """
    return {_TRAINED.format(k): chosen[..., k : k + 1] for k in range(chosen.shape[-1])}


def trained_modes(uploads: Tree, modes: int) -> list[int]:
    """The modes that a client trained in a joint visit, by its uploads [P]; by default all K."""
    flags = [uploads.get(_TRAINED.format(k)) for k in range(modes)]
    return [k for k, flag in enumerate(flags) if flag is None or float(flag) > 0]


def with_choices(result: RoundResult, buffers: Tensor, picks: Tensor) -> RoundResult:
    """The result as if clients had trained other modes, for a round in which all modes were equal.

    A client's change is the same for whichever of them it trained, so that the server may decide
    afterwards. The mean over all clients is computed again, from the gathered uploads.

    Args:
        result: of the engine; each client trained one mode.
        buffers: running statistics that were sent, [1, K * R].
        picks: 1 for the modes that a client trained, else 0, [J, K]. More than one is allowed.
    """
    members = result.cohort.members
    assert members is not None
    modes = picks.shape[1]
    # Modes of the same clients get the same row, and not one that is computed again: rounding may
    # differ between rows of a matmul, and modes that are equal would no longer be.
    groups, row = torch.unique(picks.T, dim=0, return_inverse=True)
    weight = members.weight / members.weight.sum()
    share = groups.to(weight.dtype) * weight  # [groups, J]

    def mean(changes: Tensor) -> Tensor:
        # The modes that a client did not train have a change of zero.
        change = changes.reshape(len(changes), modes, -1).sum(1)  # [J, P]
        of_groups: Tensor = share.to(change.dtype) @ change
        return of_groups[row].reshape(1, -1)

    dtype = result.uploads[_TRAINED.format(0)].dtype
    flags = trained_flags(share.sum(1)[row].to(dtype))
    changes = {name: value for name, value in members.uploads.items() if name not in flags}
    return result._replace(
        uploads={
            **{name: mean(value) for name, value in changes.items()},
            **{name: value.reshape(1, 1) for name, value in flags.items()},
        },
        buffers=buffers + mean(members.buffers - buffers),
    )


def split_result(result: RoundResult, buffers: Tensor, modes: int) -> RoundResult:
    """The result of joint visits with one row per mode, [K, P].

    Args:
        result: of the engine, with the mean of wide uploads.
        buffers: running statistics that were sent, [1, K * R].
    """
    uploads, cohort = dict(result.uploads), result.cohort
    flags = [uploads.pop(_TRAINED.format(k), None) for k in range(modes)]
    if any(flag is None for flag in flags):
        flags = [torch.ones_like(cohort.count)] * modes
    # The mean of the flags is the share of each mode's clients, by weight. The mean over all
    # clients of a change that is 0 for some of them, divided by it, is the mean over the others.
    share = torch.cat([flag for flag in flags if flag is not None])  # [K, 1]
    scale = torch.where(share > 0, share, torch.ones_like(share))

    def split(value: Tensor) -> Tensor:
        return value.reshape(modes, -1) / scale.to(value.dtype)

    return result._replace(
        uploads={name: split(value) for name, value in uploads.items()},
        buffers=buffers.reshape(modes, -1) + split(result.buffers - buffers),
        cohort=replace(
            cohort,
            # The number of clients is exact with uniform weights, else in proportion to weight.
            count=cohort.count * share,
            weight=cohort.weight * share,
            share=cohort.share * share,
            shared_draw=cohort.shared_draw.expand(modes, 1),
            members=None,
        ),
    )


def visit_vectors(algorithm: Algorithm, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters and running statistics that a visit has: of one mode [P], or of all [K * P].

    Args:
        theta, buffers: of the modes, [K, P] and [K, R].
    """
    return (theta.flatten(), buffers.flatten()) if algorithm.joint else (theta[0], buffers[0])


def check_joint(algorithm: Algorithm, schedule: Schedule, attack: Attack | None) -> bool:
    """Whether an attack on uploads is simulated; raises if joint visits cannot be used in a run."""
    forges = attack is not None and attack.forges
    if not algorithm.joint:
        return forges
    name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
    if not schedule.one_mode_per_client or schedule.trains_apart:
        other = schedules.name_of(type(schedule)) or type(schedule).__name__
        raise InputError(
            f"Clients of algorithm '{name}' receive all modes in each visit, and schedule "
            f"'{other}' trains each mode in visits of its own. Use schedule 'balanced'; only its "
            "clients matter."
        )
    if schedule.needs_reports:
        other = schedules.name_of(type(schedule)) or type(schedule).__name__
        raise InputError(
            f"Schedule '{other}' assigns modes to clients, and clients of algorithm '{name}' "
            "receive all of them. Use schedule 'balanced'; only its clients matter."
        )
    if forges:
        raise InputError(
            f"Attacks on uploads cannot be simulated with algorithm '{name}', whose uploads say "
            f"which mode they are for. Leave {setting('attack')} out, or use 'label-flip'."
        )
    return forges
