"""The client's side of a federated calibration: answers queries by sums over its rows.

A query is a dict of numbers, texts and lists of numbers, so that it can be a message to a real
client. An answer is a dict of tensors: sums and histograms over rows. About single rows they tell
only the largest residual, rounded up to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from .. import prng
from .calibration_settings import TEMPERATURE_SHARE
from .conformal_scores import INTERVAL_METHODS, class_scores, interval_scores
from .conformal_threshold import bin_edges, count_scores
from .scores import probability_score
from .temperature import (
    combine_members,
    log_mean,
    scale_members,
    scaled_mean,
    temperature_sums,
)

Query = Mapping[str, Any]
Answer = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class CalibrationClient:
    """One client's calibration rows with the outputs of all models.

    Args:
        outputs: of all models for the rows, [K, S, n, ..., C]: logits, or values for regression.
        target: [n, ...].
        by_logits: whether the ensemble averages logits.
        seed: of the run.
        salt: `rows_salt` of the rows' inputs.
    """

    outputs: Tensor
    target: Tensor
    by_logits: bool
    seed: int
    salt: int

    def answer(self, query: Query) -> Answer:
        """The answer to a query of `calibration_server`."""
        answers = {
            "temperature": self._temperature,
            "nll": self._nll,
            "range": self._range,
            "histogram": self._histogram,
            "threshold": self._threshold,
            "uncertainty": self._uncertainty,
        }
        return answers[query["kind"]](query)

    @cached_property
    def _fits_temperature(self) -> Tensor:
        """Whether each row is one of those that fit the temperature, bool [n].

        A client of a fleet does not know its index, so the salt makes clients differ. Without it,
        the first rows of all clients would fit the temperature or none of them would, and clients
        with one row each would have no row for one of the two.
        """
        key = prng.key(self.seed, "temperature rows", self.salt)
        return prng.uniform(key, len(self.target)) < TEMPERATURE_SHARE

    def _rows(self, query: Query, *, fit: bool) -> tuple[Tensor, Tensor]:
        """Outputs and targets of the rows that fit the temperature, or of the others."""
        if not query["split"]:
            return self.outputs, self.target
        chosen = self._fits_temperature == fit
        return self.outputs[:, :, chosen], self.target[chosen]

    def _temperature(self, query: Query) -> Answer:
        outputs, target = self._rows(query, fit=True)
        labels = target.reshape(-1)
        mean = log_mean(outputs, by_logits=self.by_logits)
        answer = {
            "count": torch.tensor([len(labels)], dtype=torch.int32),
            "mean": temperature_sums(mean.flatten(0, -2), labels),
        }
        if query["member"]:
            # Modes with S models have one temperature for all of them: their NLL is summed.
            answer["member"] = torch.stack(
                [
                    temperature_sums(mode.flatten(0, -2), labels.repeat(len(mode)))
                    for mode in outputs
                ]
            )
        return answer

    def _nll(self, query: Query) -> Answer:
        """Sums over rows of the NLL and of that of the likeliest wrong class, before and after."""
        outputs, target = self._rows(query, fit=True)
        outputs, temperatures = outputs.double(), tuple(query["temperatures"])
        before = log_mean(outputs, by_logits=self.by_logits)
        if query["place"] == "member":
            scaled = scale_members(outputs, temperatures)
            after = log_mean(scaled, by_logits=self.by_logits)
        else:
            after = (before / temperatures[0]).log_softmax(-1)
        sums = []
        for log_p in (before, after):
            label = target.long().unsqueeze(-1)
            right = log_p.gather(-1, label)
            wrong = log_p.scatter(-1, label, -1e4).amax(-1)  # -1e4: less than any class has
            sums += [-right.sum(), -wrong.sum()]
        return {"nll": torch.stack(sums)}

    def _mean(self, query: Query, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Calibrated mean and members of class probabilities."""
        temperatures = tuple(query["temperatures"])
        if query["place"] == "member":
            outputs = scale_members(outputs, temperatures)
        members = torch.softmax(outputs, -1)
        if query["place"] == "mean":
            mean = scaled_mean(outputs, temperatures[0], by_logits=self.by_logits)
        else:
            mean = combine_members(outputs, members, by_logits=self.by_logits)
        return mean, members.flatten(0, 1)

    def _scores(self, query: Query) -> tuple[Tensor, Tensor]:
        """The score of each row and its group, [n] each."""
        outputs, target = self._rows(query, fit=False)
        group = torch.zeros(len(target), dtype=torch.int64)
        if query["method"] in INTERVAL_METHODS:
            mean = outputs.mean((0, 1))
            return interval_scores(mean, target, query["method"]), group
        scores = class_scores(
            self._mean(query, outputs)[0],
            query["method"],
            randomized=query["randomized"],
            penalty=query["penalty"],
            free_classes=query["free_classes"],
        )
        own = scores.gather(1, target.long().unsqueeze(1)).squeeze(1)
        return own, target.long() if query["by_class"] else group

    def _range(self, query: Query) -> Answer:
        scores, _ = self._scores(query)
        reach = float(scores.abs().max()) if len(scores) else 0.0
        # Rounded up to a power of two, so that it does not tell the largest error of a row.
        power = 2.0 ** math.ceil(math.log2(reach)) if reach > 0 else 0.0
        return {"reach": torch.tensor([power], dtype=torch.double)}

    def _edges(self, query: Query) -> Tensor:
        lower, upper = (torch.tensor(query[end], dtype=torch.double) for end in ("lower", "upper"))
        return bin_edges(lower, upper, query["bins"])

    def _histogram(self, query: Query) -> Answer:
        counts = count_scores(*self._scores(query), self._edges(query))
        return {"counts": counts.to(torch.int32)}

    def _threshold(self, query: Query) -> Answer:
        """The client's own threshold, by its rows and the scores of all clients, if it has few.

        A client with enough rows needs no other. With fewer, all clients together count as
        `pool_weight` rows more, in which their scores have their shares.
        """
        edges = self._edges(query)
        own = count_scores(*self._scores(query), edges)[0].cumsum(0)
        pool = torch.tensor(query["pool"]).cumsum(0)
        weight = query["pool_weight"] if own[-1] < query["pool_weight"] else 0
        needed = (1 - query["alpha"]) * (own[-1] + weight + 1)
        reached = own + weight * pool / pool[-1] >= needed - 1e-9
        # The last edge always reaches it: `pool_weight` is the number of rows that are needed.
        return {"threshold": edges[0, reached.int().argmax()].reshape(1)}

    def _uncertainty(self, query: Query) -> Answer:
        outputs, target = self._rows(query, fit=False)
        mean, members = self._mean(query, outputs)
        score = probability_score(query["score"], mean, members).reshape(-1).double()
        wrong = (mean.argmax(-1) != target).reshape(-1).long()
        edges = self._edges(query)
        # Rounding can make an entropy exceed the largest one.
        counts = count_scores(score.minimum(edges[0, -1]), wrong, edges.expand(2, -1))
        return {"counts": counts.to(torch.int32)}


def rows_salt(inputs: Tensor) -> int:
    """A hash of the inputs of a client's rows: equal in a simulation and on a real client."""
    stored = inputs.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(sha256(stored.numpy().tobytes()).digest()[:7], "little")


def answer_bytes(answer: Answer) -> int:
    """The size of an answer's tensors."""
    return sum(value.numel() * value.element_size() for value in answer.values())


def query_bytes(query: Query) -> int:
    """The size of a query's lists of numbers, 8 bytes each; all else is negligible."""
    return sum(8 * len(value) for value in query.values() if isinstance(value, list))
