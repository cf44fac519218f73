"""The convolutional network of pfl-research's CIFAR-10 benchmark."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..errors import InputError
from .layers import check_images
from .registry import models


@models.register("cnn-pfl")
class BenchmarkCNN(nn.Module):
    """Two convolutions and two linear layers, as in the benchmarks of pfl-research.

    conv 3x3, 32 filters, no padding - ReLU - conv 3x3, 64 filters, no padding - ReLU - max pool 2 -
    dropout 0.25 - 128 units - ReLU - dropout 0.5 - outputs. 1,626,442 parameters for 32x32 images
    with 3 channels and 10 classes. As in pfl-research, weights are Glorot-uniform, and biases have
    torch's default initialization.

    Reference: Granqvist et al., "pfl-research: simulation framework for accelerating research in
    private federated learning", NeurIPS 2024 (datasets and benchmarks); `simple_cnn` in its
    benchmarks.

    Args:
        shape: (channels, height, width) of one image, at least 6x6.
        outputs: number of classes.
    """

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        check_images("cnn-pfl", shape)
        if min(shape[1:]) < 6:
            raise InputError(
                f"Model 'cnn-pfl' needs images of at least 6x6; got {shape[1]}x{shape[2]}."
            )
        height, width = ((side - 4) // 2 for side in shape[1:])
        self.layers = nn.Sequential(
            nn.Conv2d(shape[0], 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * height * width, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, outputs),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]
