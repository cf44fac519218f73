"""The paper's two-layer convolutional network for MNIST."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .argument_checks import check_dropout
from .registry import models


@models.register("cnn")
class CNN(nn.Module):
    """Two convolutions with max-pooling, then two linear layers, as in the authors' published code.

    conv 5x5, 10 filters - pool 2 - ReLU - conv 5x5, 20 filters - dropout of channels - pool 2 -
    ReLU - 50 units - ReLU - dropout - outputs. 21,840 parameters for 28x28 gray images and 10
    classes.

    Args:
        shape: (channels, height, width) of one image, at least 16x16.
        outputs: number of classes.
        dropout: probability of both dropout layers; 0.5 in the paper.
    """

    def __init__(self, shape: Sequence[int], outputs: int, dropout: float = 0.5) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise InputError(
                "Model 'cnn' needs images of shape (channels, height, width), at least 16x16; "
                f"got {tuple(shape)}."
            )
        check_dropout("cnn", dropout)
        height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
        self.first = nn.Conv2d(shape[0], 10, 5)
        self.second = nn.Conv2d(10, 20, 5)
        self.drop_channels = nn.Dropout2d(dropout)
        self.hidden = nn.Linear(20 * height * width, 50)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(50, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.first(x), 2))
        x = F.relu(F.max_pool2d(self.drop_channels(self.second(x)), 2))
        x = F.relu(self.hidden(torch.flatten(x, 1)))
        return self.out(self.drop(x))  # type: ignore[no-any-return]
