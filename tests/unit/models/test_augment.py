"""Random crops and flips: only in training, each image for itself, repeatable by key."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedensemble import InputError, prng
from fedensemble.engines.stacked.forward import StackedForward
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.modeling.keyed_rng import KeyedRandomness
from fedensemble.models import PadCropFlip, models

KEY = prng.key(0, "test")
MANY = 5000
# of a count; chance has one of these tests fail once in ten million keys, and the key is fixed
DEVIATIONS = 6


def keyed(layer, x, at=KEY):
    with KeyedRandomness(at):
        return layer(x)


def distinct(*shape):
    """Images in which no number occurs twice."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def versions(x, pad):
    """All (2 pad + 1)^2 * 2 crops and flips of the images, [V, B, C, H, W], as plain slices."""
    height, width = x.shape[2:]
    padded = F.pad(x, (pad,) * 4)
    crops = [
        padded[:, :, top : top + height, left : left + width]
        for top in range(2 * pad + 1)
        for left in range(2 * pad + 1)
    ]
    return torch.stack(crops + [crop.flip(3) for crop in crops])


def choices(out, x, pad):
    """Which version of its own input each output is, [B]; exactly one must fit."""
    fits = (versions(x, pad) == out).flatten(2).all(2)
    assert (fits.sum(0) == 1).all()
    return fits.long().argmax(0)


def test_nothing_happens_in_eval():
    x = distinct(3, 2, 4, 5)
    assert torch.equal(PadCropFlip().eval()(x), x)


@pytest.mark.parametrize("shape", [(40, 3, 8, 8), (40, 1, 5, 9)], ids=str)
def test_every_image_is_a_crop_of_its_own_input(shape):
    x = distinct(*shape)
    out = keyed(PadCropFlip(), x)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert len(choices(out, x, 4).unique()) > 20  # images are moved each by its own draw


def test_all_crops_are_equally_likely():
    x = distinct(MANY, 1, 3, 3)
    counts = torch.bincount(choices(keyed(PadCropFlip(pad=1), x), x, 1), minlength=18)
    share = 1 / 18
    assert ((counts - MANY * share).abs() < DEVIATIONS * (MANY * share * (1 - share)) ** 0.5).all()


def test_without_padding_images_are_only_flipped():
    x = distinct(100, 1, 2, 2)
    chosen = choices(keyed(PadCropFlip(pad=0), x), x, 0)
    assert 20 < chosen.sum() < 80


def test_a_draw_of_one_stays_inside():
    layer = PadCropFlip(pad=4)
    assert layer._to_offset(torch.tensor([0.0, 0.999, 1.0])).tolist() == [0, 8, 8]


def test_the_key_decides():
    x = distinct(50, 1, 6, 6)
    assert torch.equal(keyed(PadCropFlip(), x), keyed(PadCropFlip(), x))
    assert not torch.equal(keyed(PadCropFlip(), x), keyed(PadCropFlip(), x, prng.key(1, "test")))


def test_an_image_does_not_depend_on_those_after_it():
    x = distinct(10, 2, 6, 6)
    assert torch.equal(keyed(PadCropFlip(), x)[:4], keyed(PadCropFlip(), x[:4]))


def test_alone_folded_and_under_vmap_are_the_same():
    x, keys, layer = distinct(12, 2, 6, 6).unflatten(0, (3, 4)), torch.arange(3), PadCropFlip()
    alone = torch.stack([keyed(layer, x[j], keys[j]) for j in range(3)])
    with StackedForward(keys, {}, x.dtype):
        folded = layer(x.flatten(0, 1)).unflatten(0, (3, 4))
    mapped = vmap(lambda images, key: keyed(layer, images, key))(x, keys)
    assert torch.equal(folded, alone) and torch.equal(mapped, alone)


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "mobilenet", "shufflenet"])
def test_an_option_of_networks_active_where_dropout_is(name):
    x = distinct(6, 3, 8, 8) / 1000
    width = {"width": 0.5} if name in ("mobilenet", "shufflenet") else {"width": 4}
    more = {"dropout": 0.0} if name == "mobilenet" else {}

    def outputs(augment, key):
        model = FunctionalModel(
            lambda: models[name](shape=(3, 8, 8), outputs=3, augment=augment, **width, **more),
            "cross_entropy",
            torch.zeros(1, dtype=torch.int64),
        )
        theta, buffers = model.init_params(0, 1)
        return model.outputs(theta[0], buffers[0], x, key)

    plain, augmented = outputs(False, None), outputs(True, None)
    assert torch.equal(plain, augmented)
    assert torch.equal(outputs(False, KEY), plain)
    moved = outputs(True, KEY)
    assert not torch.equal(moved, plain) and torch.equal(moved, outputs(True, KEY))


def test_padding_is_refused_below_zero():
    with pytest.raises(InputError, match="pad >= 0; got -1"):
        PadCropFlip(pad=-1)
