"""Models and settings on which engines are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.optimizer import SGD, Adam, Optimizer
from ..core.types import EnsembleState
from ..data.federated import FederatedData
from ..federation.federation import Federation
from ..modeling.factory import ModelFactory
from .assertions import require
from .toy_problems import (
    CLASSES,
    FEATURES,
    SIZES,
    classification,
    labels,
    numbers,
    ragged,
    small_model,
)

_TOKENS, _LENGTH, _SIDE = 6, 4, 6


def _no_check(federation: Federation, start: EnsembleState) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A model, data and settings on which engines must agree, and an additional check."""

    name: str
    model: ModelFactory
    data: Callable[[], FederatedData] = classification
    optimizer: Optimizer = SGD()  # noqa: RUF009 (frozen)
    settings: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Federation, EnsembleState], None] = _no_check


def _images() -> FederatedData:
    return ragged(numbers(sum(SIZES), 2, _SIDE, _SIDE), labels(sum(SIZES)))


def _regression() -> FederatedData:
    return ragged(numbers(sum(SIZES), FEATURES), numbers(sum(SIZES), 2, word=1))


def _texts() -> FederatedData:
    return ragged(
        labels(sum(SIZES), _LENGTH, classes=_TOKENS),
        labels(sum(SIZES), _LENGTH, classes=_TOKENS, word=1),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.Dropout2d(0.4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 4, CLASSES),
    )


def _batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, CLASSES)
    )


def _group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, CLASSES)
    )


def _layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, CLASSES))


def _rms_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.RMSNorm(6), nn.PReLU(), nn.Linear(6, CLASSES))


def _instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (1, 3), padding="same", dilation=2),
        nn.InstanceNorm2d(4, affine=True),
        nn.PReLU(4),
        nn.Conv2d(4, 3, 3, padding="valid"),
        nn.InstanceNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * 16, CLASSES),
    )


def _signals() -> FederatedData:
    return ragged(numbers(sum(SIZES), 2, 3 * _SIDE), labels(sum(SIZES)))


def _conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 5, padding="same", bias=False),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        nn.InstanceNorm1d(6, affine=True),
        nn.Flatten(),
        nn.Linear(6 * 4, CLASSES),
    )


def _padded() -> nn.Module:
    return nn.Sequential(nn.Embedding(_TOKENS, 5, padding_idx=1), nn.Tanh(), nn.Linear(5, _TOKENS))


class _Recurrent(nn.Module):
    """Tokens to tokens by a recurrent layer; `tied` shares the embedding and output matrix."""

    def __init__(self, kind: Callable[..., nn.Module], tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 5)
        self.layers = kind(5, 5, batch_first=True, **options)
        self.out = nn.Linear(5, _TOKENS, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x))[0])  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Tokens to tokens by one transformer layer with dropout, also of the attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 4)
        self.layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=8, dropout=0.3, batch_first=True
        )
        self.out = nn.Linear(4, _TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embedding(x)))  # type: ignore[no-any-return]


class _ClassToken(nn.Module):
    """Parameters outside of layers: a class token, positions and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.positions = nn.Parameter(torch.linspace(-1, 1, 4 * (_SIDE + 1)).reshape(1, -1, 4))
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.rows, self.out = nn.Linear(2 * _SIDE, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x.transpose(1, 2).flatten(2))  # one token per row of the image
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x + self.scale * F.scaled_dot_product_attention(x, x, x)
        return self.out(F.dropout(x, 0.2, self.training)[:, 0])  # type: ignore[no-any-return]


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(3, 2, 3, 2, output_padding=1),
        nn.Flatten(),
        nn.Linear(2 * _SIDE * _SIDE, CLASSES),
    )


def _frozen() -> nn.Module:
    model = _mlp()
    next(model.parameters()).requires_grad_(False)
    return model


def _frozen_body() -> nn.Module:
    """A frozen body with trained layers below and above, and a frozen weight beside a trained bias.

    The values of frozen parameters are the same in each call, so that all modes share them.
    """
    second = nn.Linear(5, 6)
    body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), second, nn.LayerNorm(6))
    with torch.no_grad():
        for parameter in body.parameters():
            values = torch.linspace(-0.8, 0.8, parameter.numel(), dtype=torch.float64).cos()
            parameter.copy_(values.reshape(parameter.shape))
    body.requires_grad_(False)
    nn.init.uniform_(second.bias.requires_grad_(True))
    return nn.Sequential(nn.Linear(FEATURES, 6), body, nn.Tanh(), nn.Linear(6, CLASSES))


def _huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.smooth_l1_loss(outputs, targets)


def _check_statistics_changed(federation: Federation, start: EnsembleState) -> None:
    changed = (federation.state.buffers != start.buffers).any(1)
    require(
        bool(changed.all()),
        f"BatchNorm's running statistics did not change in modes {changed.logical_not().tolist()}.",
    )


def _check_padding_unchanged(federation: Federation, start: EnsembleState) -> None:
    rows = [
        state.modes["theta"][:, : _TOKENS * 5].reshape(-1, _TOKENS, 5)
        for state in (start, federation.state)
    ]
    same = (rows[0] == rows[1]).all(2).all(0)
    require(
        bool(same[1]) and not bool(same[0]),
        "The embedding row of padding_idx changed in training, or no other row did.",
    )


def _check_frozen_unchanged(federation: Federation, start: EnsembleState) -> None:
    unchanged = torch.equal(federation.state.buffers, start.buffers)
    require(
        unchanged,
        "A parameter with requires_grad=False changed in training; it must stay equal bit for bit.",
    )


def _check_body_shared(federation: Federation, start: EnsembleState) -> None:
    frozen = federation.model.frozen
    expected = dict(_frozen_body().to(federation.model.dtype).named_parameters())
    names = {name for name, parameter in expected.items() if not parameter.requires_grad}
    require(
        set(frozen) == names and federation.state.buffers.shape[1] == 0,
        f"Frozen parameters that all modes share are {sorted(frozen)}; they are {sorted(names)}.",
    )
    require(
        all(torch.equal(frozen[name].cpu(), expected[name]) for name in names),
        "A parameter with requires_grad=False changed in training; it must stay equal bit for bit.",
    )


CASES = (
    Case("MLP", _mlp),
    Case("CNN with Dropout and Dropout2d", _cnn, _images),
    Case("BatchNorm", _batch_norm, _images, check=_check_statistics_changed),
    Case(
        "BatchNorm, last_batch='drop'",
        _batch_norm,
        _images,
        settings={"last_batch": "drop"},
        check=_check_statistics_changed,
    ),
    Case("GroupNorm", _group_norm, _images),
    Case("LayerNorm", _layer_norm),
    Case(
        "Embedding and LSTM with dropout between layers",
        lambda: _Recurrent(nn.LSTM, num_layers=2, dropout=0.3),
        _texts,
    ),
    Case("GRU", lambda: _Recurrent(nn.GRU), _texts),
    Case("attention", _Attention, _texts),
    Case("parameters outside of layers", _ClassToken, _images),
    Case("transposed convolutions", _autoencoder, _images),
    Case("tied weights", lambda: _Recurrent(nn.RNN, tied=True), _texts),
    Case("frozen parameters", _frozen, check=_check_frozen_unchanged),
    Case("a frozen body that all modes share", _frozen_body, check=_check_body_shared),
    Case(
        "regression with mse", lambda: nn.Linear(FEATURES, 2), _regression, settings={"loss": "mse"}
    ),
    Case(
        "a loss that returns one number",
        lambda: nn.Linear(FEATURES, 2),
        _regression,
        settings={"loss": _huber},
    ),
    Case("several epochs", small_model, settings={"epochs": 3}),
    Case("a fixed number of steps", small_model, settings={"steps": 4}),
    Case("last_batch='wrap'", small_model, settings={"last_batch": "wrap", "epochs": 2}),
    Case("last_batch='drop'", small_model, settings={"last_batch": "drop", "epochs": 2}),
    Case(
        "SGD with momentum, weight decay and clipping",
        small_model,
        classification,
        SGD(momentum=0.9, weight_decay=0.01, clip=0.5),
        {"epochs": 2},
    ),
    Case("Adam", small_model, classification, Adam(weight_decay=0.01, clip=1.0), {"epochs": 2}),
    Case("RMSNorm and PReLU", _rms_norm),
    Case("InstanceNorm, convolutions with padding by name", _instance_norm, _images),
    Case("convolutions in one dimension", _conv1d, _signals),
    Case("Embedding with padding", _padded, _texts, check=_check_padding_unchanged),
)
