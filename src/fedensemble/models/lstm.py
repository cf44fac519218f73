"""A recurrent network that predicts the next character."""

from torch import Tensor, nn

from ..errors import InputError
from .argument_checks import check_dropout, check_widths
from .registry import models

_MOST_LAYERS = 1000


@models.register("lstm")
class LSTM(nn.Module):
    """An LSTM over tokens: [B, T] in, logits of the next token at every position out, [B, T, V].

    Embedding of 8 numbers, two layers of 256 units, linear layer: the network for Shakespeare of
    McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
    AISTATS 2017, with an output at every position as in Reddi et al., "Adaptive federated
    optimization", ICLR 2021. 798,720 + 265 V parameters. That is 822,570 for the V = 90 of Reddi et
    al., 2,048 more than they count: torch's LSTM has two biases a gate, theirs one. Initialised by
    torch's defaults.

    Args:
        outputs: number of different tokens, V.
        embedding: numbers a token is embedded in.
        layers: number of LSTM layers.
        hidden: units of each.
        dropout: probability, between the layers.
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
        if layers > _MOST_LAYERS:
            raise InputError(f"Model 'lstm' needs layers <= {_MOST_LAYERS}; got {layers}.")
        check_dropout("lstm", dropout)
        if dropout > 0 and layers == 1:
            raise InputError(
                f"Model 'lstm' has dropout between layers; one layer has none. Got dropout={dropout}."
            )
        self.embedding = nn.Embedding(outputs, embedding)
        self.layers = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=dropout)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x))[0])  # type: ignore[no-any-return]
