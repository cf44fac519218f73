"""A recurrent network that predicts the next character."""

from torch import Tensor, nn

from ..errors import InputError
from .argument_checks import check_dropout, check_widths
from .registry import models

_MAX_LAYERS = 1000


@models.register("lstm")
class LSTM(nn.Module):
    """An LSTM over tokens [B, T] that returns the logits of the next token, [B, T, V].

    An embedding of dimension 8, two LSTM layers of 256 units and a linear layer: the network for
    Shakespeare of McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017, with an output at every position as in Reddi et al.,
    "Adaptive federated optimization", ICLR 2021. It has 798,720 + 265 V parameters. For V = 90 as
    in Reddi et al. that is 822,570, which is 2,048 more than they report, because torch's LSTM has
    two biases per gate and theirs has one. Initialization is torch's default.

    Args:
        outputs: number of different tokens, V.
        embedding: dimension of the embedding.
        layers: number of LSTM layers.
        hidden: number of units per layer.
        dropout: probability of dropout between the layers.
    """

    def __init__(
        self,
        outputs: int,
        embedding: int = 8,
        layers: int = 2,
        hidden: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("embedding", embedding), ("layers", layers), ("hidden", hidden)):
            check_widths("lstm", name, [value])
        if layers > _MAX_LAYERS:
            raise InputError(f"Model 'lstm' needs layers <= {_MAX_LAYERS}; got {layers}.")
        check_dropout("lstm", dropout)
        if dropout > 0 and layers == 1:
            raise InputError(
                "Model 'lstm' has dropout between layers only; with one layer it needs "
                f"dropout=0. Got dropout={dropout}."
            )
        self.embedding = nn.Embedding(outputs, embedding)
        self.layers = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=dropout)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x))[0])  # type: ignore[no-any-return]
