"""The calibration of an ensemble: temperatures, thresholds of sets or intervals, of abstention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, unknown
from .calibration_settings import CalibrationSettings, Place
from .conformal_scores import class_scores, interval_within
from .conformal_threshold import bin_edges
from .scores import score_range


@dataclass(frozen=True, eq=False)
class Calibration:
    """What clients' calibration rows say about an ensemble; made by `Federation.calibrate`.

    Args:
        settings: what was calibrated, and how.
        outputs: of the model per row: classes, or values for regression.
        modes: number of modes K that the temperatures are for.
        rows: number of calibration rows of all clients.
        clients: number of clients that have some.
        place: what the temperatures divide: the logits of the mean or of each member; None if
            there are none.
        temperatures: one of the mean, or one per mode.
        nll: per row before and after scaling, on the rows that the temperature was fitted on; empty
            without temperatures.
        thresholds: of the scores of sets or intervals: one, or one per class; empty without them.
        client_thresholds: one per client with scope "client". Rows of other clients get the common
            threshold.
        client_names: names of these clients, or None.
        abstention: number of right and wrong answers in bins of a score of uncertainty, by score.
        bytes_up, bytes_down: sent by all clients, and to them.
    """

    settings: CalibrationSettings
    outputs: int
    modes: int
    rows: int
    clients: int
    place: Place | None = None
    temperatures: tuple[float, ...] = ()
    nll: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()
    client_thresholds: tuple[float, ...] = ()
    client_names: tuple[str, ...] | None = None
    abstention: dict[str, list[list[int]]] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0

    def __repr__(self) -> str:
        """Temperatures, method, level and rows, on one line."""
        settings, parts = self.settings, []
        if self.temperatures:
            values = ", ".join(f"{value:.3g}" for value in self.temperatures)
            parts.append(f"temperature {values} of the {self.place}")
        if self.thresholds:
            parts.append(f"{settings.method} at alpha {settings.alpha:g} for {settings.scope}")
        rows = f"{self.rows} rows of {self.clients} clients"
        return f"Calibration({'; '.join([*parts, rows])})"

    @property
    def has_sets(self) -> bool:
        """Whether it makes prediction sets or intervals."""
        return bool(self.thresholds)

    def sets(self, probabilities: Tensor, client: Any = None) -> Tensor:
        """The classes in each row's prediction set, bool [n, C].

        Args:
            probabilities: of the calibrated ensemble, [n, C].
            client: of the rows, see `row_thresholds`.
        """
        return self.sets_within(probabilities, self.row_thresholds(len(probabilities), client))

    def sets_within(self, probabilities: Tensor, thresholds: Tensor) -> Tensor:
        """The classes whose score is at most a threshold of `row_thresholds`, bool [n, C]."""
        return self.scores(probabilities) <= thresholds.to(probabilities.device)

    def scores(self, probabilities: Tensor) -> Tensor:
        """The conformity score of each class, [n, C] float64."""
        settings = self.settings
        return class_scores(
            probabilities,
            settings.method,  # type: ignore[arg-type]
            randomized=settings.randomized,
            penalty=settings.penalty,
            free_classes=settings.free_classes,
        )

    def interval(self, outputs: Tensor, client: Any = None) -> Tensor:
        """Lower and upper end of each row's interval, [n, 2] float64.

        Args:
            outputs: mean prediction of the ensemble.
            client: of the rows, see `row_thresholds`.
        """
        return self.interval_within(outputs, self.row_thresholds(len(outputs), client))

    def interval_within(self, outputs: Tensor, thresholds: Tensor) -> Tensor:
        """The values whose score is at most a threshold of `row_thresholds`, [n, 2] float64."""
        limit = thresholds.squeeze(1).to(outputs.device)
        return interval_within(outputs, limit, self.settings.method)  # type: ignore[arg-type]

    def row_thresholds(self, rows: int, client: Any = None) -> Tensor:
        """The threshold of each row and class, [n, C] or [n, 1].

        Args:
            rows: number of rows, n.
            client: name or index of the client that the rows belong to, or a list of one per row;
                -1 or None is a client that did not take part.
        """
        common = torch.tensor(self.thresholds, dtype=torch.double).expand(rows, -1)
        if client is None:
            return common
        if not self.client_thresholds:
            raise InputError(
                "Prediction sets do not depend on the client: calibrate with scope='client', or "
                "leave client out."
            )
        index = torch.tensor(self._client_indices(client, rows))
        own = torch.tensor(self.client_thresholds, dtype=torch.double)
        return torch.where(index >= 0, own[index.clamp(min=0)], common[:, 0]).unsqueeze(1)

    def _client_indices(self, client: Any, rows: int) -> list[int]:
        """The index of each row's client."""
        if isinstance(client, Tensor):
            client = client.tolist()
        single = isinstance(client, (str, int))
        given: list[Any] = [client] if single else list(client)
        if len(given) != rows and not single:
            raise InputError(f"There are {rows} rows; got {len(given)} clients.")
        names = list(self.client_names or ())
        count, found = len(self.client_thresholds), []
        for value in given:
            if isinstance(value, str) and value not in names:
                raise InputError(unknown("client", value, names))
            index = names.index(value) if isinstance(value, str) else int(value)
            if not -1 <= index < count:
                raise InputError(f"There are clients 0 to {count - 1}, and -1; got {index}.")
            found.append(index)
        return found * rows if single else found

    def abstention_rows(self, score: str) -> tuple[Tensor, Tensor]:
        """Uncertainty, rounded up to a bin's edge, and error of each calibration row, [n] each."""
        if score not in self.abstention:
            known = ", ".join(self.abstention) or "no score"
            raise InputError(
                f"The calibration of this ensemble has {known} to abstain by: calibrate with "
                f"abstain=['{score}'], or pass calibration=(prediction, labels)."
            )
        counts = torch.tensor(self.abstention[score])  # [2, bins]: right and wrong answers
        upper = torch.tensor([score_range(score, self.outputs)])
        edges = bin_edges(torch.zeros(1), upper, counts.shape[1])[0]
        uncertainty = torch.cat([edges.repeat_interleave(row) for row in counts])
        wrong = torch.arange(2).repeat_interleave(counts.sum(1)).bool()
        return uncertainty, wrong

    def to_record(self) -> dict[str, Any]:
        """The calibration as values of JSON."""
        values = asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @classmethod
    def from_record(cls, record: Any) -> Calibration:
        """The calibration that `to_record` described; raises ValueError unless it is one.

        The record may come from a file that anyone can have written: nothing in it is trusted.
        """
        try:
            settings = CalibrationSettings(**record["settings"])
            values = {**record, "settings": settings}
            for name in ("temperatures", "nll", "thresholds", "client_thresholds"):
                values[name] = tuple(map(float, values[name]))
            names = values["client_names"]
            values["client_names"] = None if names is None else tuple(map(str, names))
            made = cls(**values)
            made._check()
        except (AttributeError, KeyError, TypeError, InputError, OverflowError) as error:
            raise ValueError(str(error)) from None
        return made

    def _check(self) -> None:
        """Raises ValueError if a value is not possible."""
        counts = (self.outputs, self.modes, self.rows, self.clients)
        numbers = (*self.temperatures, *self.nll, *self.thresholds, *self.client_thresholds)
        sizes = {"mean": (1,), "member": (self.modes,), None: (0,)}
        of_thresholds = (0, self.outputs if self.settings.scope == "class" else 1)
        names = self.client_names
        bins = [row for table in self.abstention.values() for row in table]
        if not (
            all(type(count) is int and 0 < count < 2**31 for count in counts)
            and bool(torch.tensor(numbers).isfinite().all())
            and all(value > 0 for value in self.temperatures)
            and self.place in sizes
            and len(self.temperatures) in sizes[self.place]
            and len(self.thresholds) in of_thresholds
            and (names is None or len(names) == len(self.client_thresholds))
            and all(len(table) == 2 for table in self.abstention.values())
            and all(len(row) == len(bins[0]) and 0 < len(row) <= 10_000 for row in bins)
            and all(type(n) is int and 0 <= n < 2**31 for row in bins for n in row)
            and all(sum(map(sum, table)) <= self.rows for table in self.abstention.values())
        ):
            raise ValueError("its values are not those of a calibration")
