"""Personal models of clients: how each client uses the K modes, and how well that works for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint_file import read_checkpoint, write_checkpoint
from ..client_metrics import ClientMetrics, evaluate_clients
from ..data.client_rows import NOBODY
from ..data.federated import FederatedData
from ..errors import InputError, StoreError
from ..federation.mode_bank import ModeBank, with_models
from ..modeling.frozen import is_earlier, read_earlier
from ..predict import Ensemble
from ..prediction import Prediction
from ..text import as_path, shorten

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Personalization:
    """Models of single clients, made by `personalize`.

    Attributes:
        method: "select", "mix", "posterior", "tune" or "head".
        weights: of each mode for each client, float64 [N, K]; of "tune" and "head", those of the
            mode that training started from.
        rows: number of validation rows of each client, [N]. A client without any gives all modes
            equal weights, and tunes the mode that is best for all clients together.
        bytes_down, bytes_up: sent to all clients, and by them, for the personalization.
        theta, buffers: of each client's trained model, [N, P] and [N, R]; None without training.
        bank: the K modes as clients have them.
        data: the clients' data; None for a result that was loaded.
        names: of the clients, or None.
        new: the same for the clients that were not trained on; None if there are none.
    """

    method: str
    weights: Tensor
    rows: Tensor
    bytes_down: int
    bank: ModeBank
    bytes_up: int = 0
    theta: Tensor | None = None
    buffers: Tensor | None = None
    data: FederatedData | None = None
    names: tuple[str, ...] | None = None
    new: Personalization | None = None

    def __repr__(self) -> str:
        """The method, the number of clients and what they chose, on one line."""
        counts = torch.bincount(self.choice + 1, minlength=len(self.bank) + 1).tolist()
        by_mode = ", ".join(str(count) for count in counts[1:])
        without = f", {counts[0]} with the ensemble" if counts[0] else ""
        return (
            f"Personalization({self.method}, {len(self)} clients, by largest weight: {by_mode}"
            f"{without}, {self.bytes_down:,} bytes down)"
        )

    def __len__(self) -> int:
        """Number of clients, N."""
        return len(self.weights)

    @property
    def choice(self) -> Tensor:
        """The mode with the largest weight, [N]; -1 for a client that chose none."""
        chosen = self.weights.argmax(1)
        undecided = (self.rows == 0) & (self.theta is None)
        return torch.where(undecided, NOBODY, chosen)

    def module(self, client: int | str) -> Any:
        """The trained model of a client as an nn.Module, as `Ensemble.module`."""
        if self.theta is None or self.buffers is None:
            raise InputError(
                f"Method '{self.method}' trains no model: a client uses modes with its weights. "
                "Use module(mode) of the ensemble."
            )
        index = int(self._clients(client, 1)[0])
        if index < 0:
            raise InputError("module() needs a client that has a model.")
        return self._own_model(index).module(0)

    def predict(self, x: Any, client: Any, *, batch_size: int = 1024) -> Prediction:
        """The prediction of clients' own models for inputs [B, ...].

        The prediction has one member, because the weights of modes differ between rows.

        Args:
            x: inputs as in training, before normalization.
            client: that the inputs belong to: name or index, or a list of one per input; None or -1
                is a client that is not known, for which the modes have equal weights.
            batch_size: inputs per forward pass.
        """
        inputs = torch.as_tensor(x)
        owner = self._clients(client, len(inputs) if inputs.dim() else 0)
        if self.theta is None or self.buffers is None:
            return self._mix(inputs, owner, batch_size)
        means, places = [], []
        for each in sorted(set(owner.tolist())):
            place = torch.nonzero(owner == each).flatten()
            own = self.bank.ensemble if each < 0 else self._own_model(each)
            means.append(own.predict(inputs[place], batch_size=batch_size).mean)
            places.append(place)
        return self._prediction(torch.cat(means)[torch.cat(places).argsort()])

    def _mix(self, x: Tensor, owner: Tensor, batch_size: int) -> Prediction:
        """The weighted means of the modes' predictions."""
        raw = self.bank.outputs(x, owner, batch_size)
        modes = self.bank.ensemble._combine_outputs(raw).modes  # [K, B, ..., C]
        equal = self.weights.new_full((1, len(self.bank)), 1 / len(self.bank))
        weights = torch.cat([self.weights, equal])[owner].T.to(modes.dtype)  # owner -1 is last
        weights = weights.reshape(*weights.shape, *(1,) * (modes.dim() - 2))
        # A mode without weight must not count, whatever it predicts.
        return self._prediction(torch.where(weights > 0, weights * modes, 0).sum(0))

    def _prediction(self, mean: Tensor) -> Prediction:
        like = self.bank.ensemble
        names = (
            like.class_names
            if like.class_names and len(like.class_names) == mean.shape[-1]
            else None
        )
        return Prediction(mean, mean.unsqueeze(0), like.model.task, like.combine, class_names=names)

    def _own_model(self, client: int) -> Ensemble:
        assert self.theta is not None
        assert self.buffers is not None
        return with_models(
            self.bank.ensemble, self.theta[client : client + 1], self.buffers[client : client + 1]
        )

    def evaluate_clients(self, *, new: bool = False) -> ClientMetrics:
        """Metrics of each client's own model on its own test rows, `data.test_owner`.

        Args:
            new: whether to test the clients that are not trained on.
        """
        if new:
            if self.new is None:
                raise InputError(
                    "These data have no new clients: hold some out with data.with_new_clients(0.1)."
                )
            return self.new.evaluate_clients()
        data = self.data
        if data is None or data.x_test is None or data.y_test is None or data.test_owner is None:
            raise InputError(
                "There are no test rows that belong to these clients: use partition(), or pass "
                "x_test, y_test and test_owner to FederatedData. A loaded result has no data: use "
                "predict() and fe.evaluate_clients()."
            )
        own = data.test_owner >= 0
        prediction = self.predict(data.x_test[own], data.test_owner[own])
        return evaluate_clients(prediction, data.y_test[own], data.test_owner[own], len(data))

    def save(self, folder: str | Path) -> Path:
        """Writes weights and models next to a saved run; returns the file's path.

        The file is personal: only this user can read it.

        Args:
            folder: of the run, as `Federation.save` returned.
        """
        path = as_path(folder) / file_name(self.method)
        tensors, facts = self._stored("")
        if self.new is not None:
            more, facts["new"] = self.new._stored("new/")
            tensors |= more
        write_checkpoint(path, tensors, {**facts, "format": _FORMAT}, private=True)
        return path

    def _stored(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        named = {
            "weights": self.weights,
            "rows": self.rows,
            "theta": self.theta,
            "buffers": self.buffers,
            "bank/theta": self.bank.theta,
            "bank/buffers": self.bank.buffers,
        }
        facts = {
            "method": self.method,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "names": None if self.names is None else list(self.names),
        }
        return {prefix + name: t for name, t in named.items() if t is not None}, facts

    def _clients(self, client: Any, rows: int) -> Tensor:
        """The index of each row's client, [rows]; -1 for one that is not known."""
        if isinstance(client, Tensor):
            client = client.tolist()
        single = client is None or isinstance(client, (str, int))
        given: Sequence[Any] = [client] * rows if single else list(client)
        if len(given) != rows:
            raise InputError(f"predict() got {rows} rows and {len(given)} clients.")
        number = {name: index for index, name in enumerate(self.names or ())}
        found = []
        for each in given:
            index = NOBODY if each is None else number.get(each, each)
            if isinstance(index, bool) or not isinstance(index, int) or not -1 <= index < len(self):
                raise InputError(
                    f"There is no client {shorten(repr(each))}: give a name, or an index from 0 to "
                    f"{len(self) - 1}."
                )
            found.append(index)
        return torch.tensor(found, dtype=torch.int64)


def file_name(method: str) -> str:
    """The name of the file of a method's result in a run's folder."""
    return f"personal-{method}.safetensors"


def read_personalization(path: Path, ensemble: Ensemble) -> Personalization:
    """The result in a file; raises StoreError if it does not fit the ensemble.

    Args:
        ensemble: of the same run.
    """
    tensors, facts = read_checkpoint(path)
    try:
        result = _restore(path, tensors, facts, "", ensemble)
        if facts.get("new") is not None:
            new = _restore(path, tensors, facts["new"], "new/", ensemble)
            return Personalization(**{**vars(result), "new": new})
        return result
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no result of personalize: {error!r} is missing.") from None


def _restore(
    path: Path,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    prefix: str,
    ensemble: Ensemble,
) -> Personalization:
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    weights, rows = found["weights"], found["rows"]
    clients, modes, size = len(weights), len(ensemble), ensemble.theta.shape[1]
    expected = {
        "weights": (clients, modes),
        "rows": (clients,),
        "theta": (clients, size),
        "bank/theta": (clients, modes, size),
    }
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            raise StoreError(
                f"{path} does not fit the run: '{name}' has shape {tuple(found[name].shape)}, and "
                f"{shape} is expected."
            )
    model = ensemble.model
    for name in ("buffers", "bank/buffers"):
        if is_earlier(found, model, name):
            found = read_earlier(found, model, name)
    names = facts["names"]
    device = ensemble.theta.device
    models = {
        name: found[name].to(device)
        for name in ("theta", "buffers", "bank/theta", "bank/buffers")
        if name in found
    }
    return Personalization(
        method=str(facts["method"]),
        weights=weights,
        rows=rows,
        bytes_down=int(facts["bytes_down"]),
        bytes_up=int(facts["bytes_up"]),
        bank=ModeBank(ensemble, models.get("bank/theta"), models.get("bank/buffers")),
        theta=models.get("theta"),
        buffers=models.get("buffers"),
        names=None if names is None else tuple(names),
    )
