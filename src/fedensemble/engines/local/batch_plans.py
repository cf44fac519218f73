"""The batch plans of visits: what follows from seed, round and plan alone, for all runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import prng
from ...core.types import Plan
from ...core.visits.batches import batch_table
from .block import BatchPlan
from .device_cache import to_device_async

if TYPE_CHECKING:
    from .local_engine import LocalEngine

_MAX_CPU_EXAMPLES = 20_000  # of a block whose batch table is made on the CPU


def make_batch_plans(
    engines: Sequence[LocalEngine], plans: Sequence[Plan], rounds: Sequence[int]
) -> list[BatchPlan]:
    """The batch plan of each run's visits.

    The visits of all runs are one list here, because small models spend most of a round in calls of
    functions on a few integers. Each visit has the key and the batches that it has on its own.

    Args:
        engines: of the runs, with the same model, work and device.
        plans: of each run, the visits to prepare.
        rounds: of each run, counted from 0.
    """
    first = engines[0]
    device, dtype, work = first.model.device, first.model.dtype, first.work
    lengths = [len(plan.client) for plan in plans]
    client, mode = (
        torch.cat([getattr(plan, name) for plan in plans]) for name in ("client", "mode")
    )

    def draw_keys(purpose: str, *words: Tensor) -> Tensor:
        """A key of each visit, as `visit_key` makes them."""
        parents = [
            int(prng.key(engine.seed, purpose, round))
            for engine, round in zip(engines, rounds, strict=True)
        ]
        parent = torch.tensor(parents).repeat_interleave(torch.tensor(lengths))
        return torch.as_tensor(prng.fold_in(parent, *words))

    # Keys and small batch tables are made on the CPU: they take many tiny operations, for which
    # the launch of a GPU kernel costs more than the operation itself.
    batch_key, model_key, algorithm_key = (
        draw_keys(purpose, client, mode) for purpose in ("batches", "model", "algorithm")
    )
    shared_draw = prng.uniform(draw_keys("coin", mode), 1)
    sizes, counts, starts = (
        torch.cat(values)
        for values in zip(
            *(
                (
                    engine.host_sizes[plan.client],
                    engine.count_steps(plan),
                    engine.starts[to_device_async(plan.client, device)],
                )
                for engine, plan in zip(engines, plans, strict=True)
            ),
            strict=True,
        )
    )
    if len(sizes) * int(sizes.max()) <= _MAX_CPU_EXAMPLES or device.type == "cpu":
        index, weight = batch_table(batch_key, sizes, work, counts=counts)
    else:
        index, weight = batch_table(
            to_device_async(batch_key, device), to_device_async(sizes, device), work, sizes, counts
        )
    joint = BatchPlan(
        batch_index=to_device_async(index, device) + starts.reshape(1, -1, 1),
        weight=to_device_async(weight, device),
        model_key=to_device_async(model_key, device),
        algorithm_key=to_device_async(algorithm_key, device),
        shared_draw=to_device_async(shared_draw.to(dtype), device),
        sizes=to_device_async(sizes.unsqueeze(-1).to(dtype), device),
        counts=to_device_async(counts.unsqueeze(-1).to(dtype), device),
    )
    if len(plans) == 1:
        return [joint]
    steps = [int(part.max()) for part in torch.split(counts, lengths)]
    return [
        BatchPlan(*(value[:most, ...] for value in parts[:2]), *parts[2:])
        for most, *parts in zip(steps, *_split(joint, lengths), strict=True)
    ]


def _split(joint: BatchPlan, lengths: list[int]) -> list[tuple[Tensor, ...]]:
    """The parts of each tensor of a batch plan that belong to the runs."""
    return [
        torch.split(value, lengths, dim=1 if name in ("batch_index", "weight") else 0)
        for name, value in joint._asdict().items()
    ]
