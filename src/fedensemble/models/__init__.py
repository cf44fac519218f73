"""Models, one file each; importing this package registers them."""

from .augment import PadCropFlip
from .cnn import CNN
from .cnn_pfl import BenchmarkCNN
from .lstm import LSTM
from .mlp import MLP
from .mobilenet import MobileNet
from .rbf import RBFLinear
from .registry import models
from .resnet18 import ResNet18
from .resnet20 import ResNet20
from .shufflenet import ShuffleNet
from .transformer import GPT, ViT
from .wide import Wide

__all__ = [
    "CNN",
    "GPT",
    "LSTM",
    "MLP",
    "BenchmarkCNN",
    "MobileNet",
    "PadCropFlip",
    "RBFLinear",
    "ResNet18",
    "ResNet20",
    "ShuffleNet",
    "ViT",
    "Wide",
    "models",
]
