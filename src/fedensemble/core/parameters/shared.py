"""Shared parameters: parameters that all modes have in common, such as those of a shared body.

The other parameters, such as those of the heads, stay separate for each mode. Every visit trains
the shared parameters, whatever its mode, and the server updates them from all visits of a round.

The server's step first updates each mode from its own clients, as without sharing. It then runs
once more on a single pooled mode, whose upload is the weighted mean over all visits, and the result
replaces the shared parameters of all modes. This is the step of a run with one mode, so that shared
parameters are trained exactly as FedAvg (or another algorithm) trains one model. Between rounds
they are equal in all modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ...errors import InputError, setting
from ...flat_params import Layout, Tree
from ...text import shorten
from ..aggregator import Aggregator, aggregate
from ..algorithm import Algorithm
from ..probe import expected_uploads
from ..types import EnsembleState, RoundResult

_MOST_NAMES = 12  # parameter names that an error message lists


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Which entries of a model's flat vectors are shared."""

    parameters: Tensor  # bool [P]
    buffers: Tensor  # bool [R]

    @classmethod
    def of(
        cls,
        patterns: Sequence[str],
        parameters: Layout,
        buffers: Layout,
        name: str | None = None,
        frozen: Iterable[str] = (),
    ) -> Shared:
        """The entries whose tensors match a pattern; raises if a pattern matches no tensor.

        A buffer is also shared if it belongs to a module whose parameters are all shared: the
        running statistics of a BatchNorm layer fit its weights.

        Args:
            name: of the setting that holds the patterns, in messages.
            frozen: names of parameters that are not trained, which all modes share anyway.

        >>> layout = Layout.of({"body.weight": torch.ones(2), "head.weight": torch.ones(1)})
        >>> Shared.of(["body.*"], layout, Layout.of({})).parameters.tolist()
        [True, True, False]
        """
        names = [*parameters.names, *buffers.names]
        for pattern in patterns:
            if not any(fnmatchcase(each, pattern) for each in (*names, *frozen)):
                raise InputError(
                    _describe_unmatched(name or setting("ensemble.shared"), pattern, names)
                )

        matching = {name for name in names if any(fnmatchcase(name, each) for each in patterns)}
        siblings: dict[str, set[str]] = {}  # the parameters of each module
        for each in parameters.names:
            siblings.setdefault(_module_of(each), set()).add(each)
        complete = {module for module, own in siblings.items() if own <= matching}
        matching |= {name for name in buffers.names if _module_of(name) in complete}
        return cls(_mask(parameters, matching), _mask(buffers, matching))

    def to(self, device: torch.device) -> Shared:
        """The same entries, on a device."""
        return Shared(self.parameters.to(device), self.buffers.to(device))

    def copy_first(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters [K, P] and buffers [K, R] with the shared entries of mode 0 in all modes."""
        return (
            torch.where(self.parameters, theta[:1], theta),
            torch.where(self.buffers, buffers[:1], buffers),
        )

    def update(
        self,
        before: EnsembleState,
        modes: Tree,
        buffers: Tensor,
        algorithm: Algorithm,
        sent: Tree,
        result: RoundResult,
        aggregator: Aggregator,
    ) -> tuple[Tree, Tensor]:
        """Server state [K, P] and buffers [K, R] after the step of the shared parameters.

        Args:
            before: the state before the round.
            modes, buffers: after the server's step of each mode.
            sent: what was broadcast, [K, P].
            result: of the engine, with the weighted mean of each mode's uploads.
            aggregator: combines the uploads of all visits, if it is not the mean.
        """
        pooled = _pool(result)
        if aggregator.gathers:
            first = {name: value[:1] for name, value in sent.items()}
            pooled = self._hide_others(pooled, algorithm, first, before.buffers[:1])
            pooled = aggregate(aggregator, algorithm, first, before.buffers[:1], pooled)
        # The shared entries of the server's state are equal in all modes, so that those of mode 0
        # stand for all. The other entries of the result have no meaning and are dropped.
        state = {name: value[:1] for name, value in before.modes.items()}
        updated = algorithm.server_update(state, pooled.uploads, pooled.cohort)
        modes = {
            name: torch.where(self.parameters, updated[name], value)
            for name, value in modes.items()
        }
        return modes, torch.where(self.buffers, pooled.buffers, buffers)

    def _hide_others(
        self, pooled: RoundResult, algorithm: Algorithm, sent: Tree, buffers: Tensor
    ) -> RoundResult:
        """The result with changes of zero where uploads are not shared.

        Rules such as Krum compare distances between changes. Parameters that are not shared belong
        to different modes, whose distances would hide who is malicious.

        Args:
            sent, buffers: of one mode, [1, P] and [1, R].
        """
        members = pooled.cohort.members
        if members is None:
            return pooled
        unchanged = expected_uploads(algorithm, sent, buffers, pooled.cohort.shared_draw)
        uploads = {
            name: torch.where(self.parameters, value, unchanged[name])
            for name, value in members.uploads.items()
        }
        members = members._replace(
            uploads=uploads, buffers=torch.where(self.buffers, members.buffers, buffers)
        )
        return pooled._replace(cohort=replace(pooled.cohort, members=members))


def _pool(result: RoundResult) -> RoundResult:
    """The result as if all visits had trained the same, single mode."""
    cohort, members = result.cohort, result.cohort.members
    share = cohort.weight / cohort.weight.sum()  # [K, 1]; zero for a mode without clients

    def mean(value: Tensor) -> Tensor:
        # Not a matmul, which would round to tf32 on a GPU if the engine computes in tf32.
        return (share.to(value.dtype) * value).sum(0, keepdim=True)

    pooled = replace(
        cohort,
        count=cohort.count.sum(0, keepdim=True),
        weight=cohort.weight.sum(0, keepdim=True),
        share=cohort.share.sum(0, keepdim=True),
        shared_draw=cohort.shared_draw[:1],
        members=None if members is None else members._replace(mode=torch.zeros_like(members.mode)),
    )
    uploads = {name: mean(value) for name, value in result.uploads.items()}
    return result._replace(uploads=uploads, buffers=mean(result.buffers), cohort=pooled)


def check_patterns(patterns: object, name: str | None = None) -> tuple[str, ...]:
    """The patterns of parameter names; raises unless they are a list of texts.

    Args:
        name: of the setting, in messages; by default that of shared parameters.
    """
    if patterns is None:
        return ()
    name = name or setting("ensemble.shared")
    if isinstance(patterns, str):
        raise InputError(
            f"{name} is a list of patterns; got {shorten(patterns)!r}. "
            f"Write [{shorten(patterns)!r}]."
        )
    if not isinstance(patterns, Sequence) or not all(
        isinstance(each, str) and each for each in patterns
    ):
        raise InputError(
            f"{name} is a list of patterns of parameter names, such as ['body.*']; "
            f"got {shorten(repr(patterns))}."
        )
    return tuple(patterns)


def _mask(layout: Layout, names: set[str]) -> Tensor:
    """True for the entries of the tensors with these names, bool, of the vector's length."""
    parts = [
        torch.full((size,), name in names)
        for name, size in zip(layout.names, layout.sizes, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _module_of(name: str) -> str:
    """The name of the module that a tensor belongs to."""
    return name.rpartition(".")[0]


def _describe_unmatched(setting_name: str, pattern: str, names: Sequence[str]) -> str:
    """The message for a pattern that matches no parameter."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    # The mistakes to expect: the name of a module without ".*", or a part of a name.
    guesses = {
        f"{pattern.rstrip('.*')}.*": [n for n in names if n.startswith(f"{pattern.rstrip('.*')}.")],
        f"*{pattern.strip('.*')}*": [n for n in names if pattern.strip(".*") in n],
    }
    guess = next((text for text, found in guesses.items() if found and pattern.strip(".*")), None)
    hint = f" Did you mean {shorten(guess)!r}?" if guess else " Use one of them, with * for a part."
    return (
        f"{setting_name}: no parameter matches {shorten(pattern)!r}. "
        f"The model has {', '.join(names[:_MOST_NAMES])}{more}.{hint}"
    )
