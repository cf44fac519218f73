"""The contract of an algorithm's own functions, called without an engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.probe import check_local_training_result
from ..core.types import Cohort, GatheredUploads
from ..core.visits.traffic import bytes_down, bytes_up
from ..flat_params import Tree, select_rows
from .assertions import require, require_close, require_equal, snapshot
from .toy_problems import numbers, quadratic_problem, small_federation


def check_arithmetic(algorithm: Algorithm) -> None:
    """Checks that shapes are kept, inputs are not written to, and rows are independent."""
    owner, visits = type(algorithm).__name__, 5
    # A federation binds the algorithm to a model, which some algorithms need.
    federation = small_federation(algorithm, "loop", modes=1, strata=1)
    algorithm, size = federation.algorithm, federation.model.theta_layout.total
    modes = algorithm.init_mode(numbers(visits, size))
    require(
        "theta" in modes, f"{owner}.init_mode must give 'theta', the model; got {sorted(modes)}."
    )
    before = snapshot(modes)
    sent = algorithm.broadcast(modes)
    require_equal(snapshot(modes), before, f"{owner}.broadcast wrote into the server's state")
    memory = algorithm.init_client_state(sent["theta"] if "theta" in sent else modes["theta"])

    before = snapshot(sent, memory)
    returned = algorithm.local_training(sent, memory, quadratic_problem(algorithm, visits, size))
    uploads, new_memory = check_local_training_result(algorithm, returned)
    require_equal(
        snapshot(sent, memory), before, f"{owner}.local_training wrote into what it was given"
    )
    _require_rows(uploads, visits, f"{owner}.local_training's upload")
    _require_rows(new_memory, visits, f"{owner}.local_training's memory")
    require(
        _forms(new_memory) == _forms(memory),
        f"{owner}.local_training changed the form of its memory: {_forms(new_memory)}.",
    )

    order = torch.arange(visits, dtype=torch.float64).unsqueeze(-1)
    weight, shared_draw = 2.0 + order, torch.full_like(order, 0.3)
    members = two_members_per_mode(uploads, weight) if algorithm.gathers else None
    round, lr = 3, algorithm.learning_rate(3)
    cohort = Cohort(
        1.0 + order,
        weight,
        weight / 20,
        population=9,
        shared_draw=shared_draw,
        members=members,
        round=round,
        lr=lr,
    )
    inputs = (
        modes,
        uploads,
        {
            "count": cohort.count,
            "weight": weight,
            "share": cohort.share,
            "shared_draw": shared_draw,
        },
        members.uploads if members is not None else {},
    )
    before = snapshot(*inputs)
    updated = algorithm.server_update(modes, uploads, cohort)
    require_equal(snapshot(*inputs), before, f"{owner}.server_update wrote into what it was given")
    require(
        _forms(updated) == _forms(modes),
        f"{owner}.server_update must keep the form {_forms(modes)}; it gave {_forms(updated)}.",
    )

    costs = {
        "upload_bytes": bytes_up(algorithm, uploads, sent, shared_draw),
        "download_bytes": bytes_down(algorithm, sent, memory, shared_draw),
    }
    for name, cost in costs.items():
        valid = isinstance(cost, int) or (
            cost.shape == shared_draw.shape and cost.dtype == torch.int64
        )
        require(
            valid,
            f"{owner}.{name} must give an int, or int64 [..., 1] like shared_draw; got {cost!r}.",
        )

    for j in range(visits):
        what = (
            f"{owner} must give a {{}} the same result alone, [P], and among others, [J, P] "
            f"(row {j})"
        )
        alone, own = algorithm.local_training(
            select_rows(sent, j),
            select_rows(memory, j),
            quadratic_problem(algorithm, visits, size, only=j),
        )
        require_close(alone, select_rows(uploads, j), what.format("client"))
        require_close(own, select_rows(new_memory, j), what.format("client's memory"))
        # Algorithms that gather uploads always get a leading dimension of modes.
        index = torch.tensor([j]) if algorithm.gathers else j
        part = Cohort(
            cohort.count[index],
            weight[index],
            cohort.share[index],
            cohort.population,
            shared_draw[index],
            round=round,
            lr=lr,
        )
        if members is not None:
            part = replace(
                part, members=two_members_per_mode(select_rows(uploads, index), weight[index])
            )
        single = algorithm.server_update(
            select_rows(modes, index), select_rows(uploads, index), part
        )
        require_close(single, select_rows(updated, index), what.format("mode"))


def two_members_per_mode(uploads: Tree, weight: Tensor) -> GatheredUploads:
    """Two clients per mode whose weighted mean is the upload, [K, P]; each differs a little."""
    modes, shift = len(weight), {name: 0.1 * value.roll(1, -1) for name, value in uploads.items()}
    both = {
        name: torch.cat([value + shift[name], value - shift[name]])
        for name, value in uploads.items()
    }
    order = torch.arange(2 * modes)
    buffers = torch.empty(2 * modes, 0, dtype=torch.float64)
    return GatheredUploads(
        order // modes, order % modes, weight.squeeze(-1).repeat(2) / 2, both, buffers
    )


def _require_rows(tree: Tree, visits: int, what: str) -> None:
    for name, value in tree.items():
        require(
            value.dim() == 2 and len(value) == visits and value.dtype == torch.float64,
            f"{what} '{name}' must be [..., P] like the input, float64; "
            f"got {tuple(value.shape)} {value.dtype}.",
        )


def _forms(tree: Tree) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(value.shape), str(value.dtype)) for name, value in sorted(tree.items())}
