"""Transformers: a vision transformer for small images and a GPT for next-token prediction."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .argument_checks import check_dropout, check_widths
from .augment import augmentation_layer
from .layers import check_images
from .registry import models

_INIT_STD = 0.02  # of all weights, as in BERT, GPT-2 and ViT


class Block(nn.Module):
    """Self-attention and two linear layers, each after a LayerNorm and with a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.in_projection = nn.Linear(width, 3 * width)
        self.out_projection = nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.first_norm(x)))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.second_norm(x)))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        """Attention over the positions of [B, T, D], with dropout of its weights in training."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.in_projection(x).chunk(3, dim=-1)
        )
        p = self.dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out_projection(out.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


@models.register("vit")
class ViT(nn.Module):
    """A vision transformer for small images, with a class token.

    Square patches become tokens, learned positions are added, and the class token's output goes to
    a linear layer. 809,354 parameters for 3x32x32 images and 10 classes.

    Reference: Dosovitskiy et al., "An image is worth 16x16 words: transformers for image
    recognition at scale", ICLR 2021; the sizes are for images of CIFAR's size.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        patch: height and width of a patch; they must divide those of the image.
        width: dimension of the tokens.
        depth: number of blocks.
        heads: number of attention heads; must divide `width`.
        dropout: probability of dropout, also of attention weights.
        augment: random crops and flips of training images, see `PadCropFlip`; also of test images
            if prediction keeps dropout active.
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        patch: int = 4,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_images("vit", shape)
        _check_sizes("vit", width, depth, heads, dropout, patch=patch)
        channels, *sides = shape
        if any(side % patch for side in sides):
            raise InputError(
                f"Model 'vit' cuts images into patches of {patch}x{patch}, which must divide the "
                f"image: got {sides[0]}x{sides[1]}. Choose another model.patch."
            )
        self.augment = augmentation_layer(augment)
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        tokens = 1 + (sides[0] // patch) * (sides[1] // patch)
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, dropout, causal=False) for _ in range(depth))
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, outputs)
        _init_weights(self, depth)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self.augment(x)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.out(self.norm(self.blocks(self.dropout(x))[:, 0]))  # type: ignore[no-any-return]


@models.register("gpt")
class GPT(nn.Module):
    """A small GPT over tokens [B, T] that returns the logits of the next token, [B, T, V].

    Learned positions, blocks with causal attention, and an output layer that shares its weights
    with the embedding. 793,344 + 128 (V + length) parameters.

    Reference: Radford et al., "Language models are unsupervised multitask learners", 2019, of whose
    architecture this is a small version.

    Args:
        outputs: number of different tokens, V.
        width: dimension of the tokens.
        depth: number of blocks.
        heads: number of attention heads; must divide `width`.
        length: longest sequence.
        dropout: probability of dropout, also of attention weights.
    """

    def __init__(
        self,
        outputs: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        length: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_sizes("gpt", width, depth, heads, dropout, length=length)
        self.embedding = nn.Embedding(outputs, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, dropout, causal=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        _init_weights(self, depth)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.positions.shape[0]:
            raise InputError(
                f"Model 'gpt' has positions for {self.positions.shape[0]} tokens; got a sequence "
                f"of {length}. Set model.length to at least {length}."
            )
        x = self.dropout(self.embedding(x) + self.positions[:length])
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def _check_sizes(
    model: str, width: int, depth: int, heads: int, dropout: float, **sizes: int
) -> None:
    for name, value in {"width": width, "depth": depth, "heads": heads, **sizes}.items():
        check_widths(model, name, [value])
    check_dropout(model, dropout)
    if width % heads:
        raise InputError(
            f"Model '{model}' needs a width that its heads divide; got width={width}, "
            f"heads={heads}."
        )


def _init_weights(model: nn.Module, depth: int) -> None:
    """Normal weights and zero biases; layers that end in a shortcut start smaller, as in GPT-2."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:  # not the scales of LayerNorm
            ends_in_shortcut = name.endswith(("contract.weight", "out_projection.weight"))
            scale = (2 * depth) ** -0.5 if ends_in_shortcut else 1.0
            nn.init.normal_(parameter, std=_INIT_STD * scale)
