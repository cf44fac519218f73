"""Every network is batched layer by layer, and the engines agree on it."""

import pytest
import torch
import torch.nn.functional as F

from fedensemble import FedAvg, Federation
from fedensemble.engines.stacked.convolution import conv2d
from fedensemble.engines.stacked.equivalence import check_stackable
from fedensemble.engines.stacked.forward import StackedForward
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models import models
from fedensemble.testing.assertions import require_close
from fedensemble.testing.cases import CASES as BATTERY
from fedensemble.testing.toy_problems import labels, numbers, ragged

SIZES, CLASSES, BATCH, TOKENS, LENGTH = (6, 4, 5), 3, 4, 7, 5
SMALL = {
    "resnet18": {"width": 4},
    "resnet20": {"width": 4},
    "mobilenet": {"width": 0.25},
    "shufflenet": {"width": 0.5},
}
CASES = {
    **{name: (name, small) for name, small in SMALL.items()},
    **{
        f"{name}, group, augmented": (name, {**small, "norm": "group", "augment": True})
        for name, small in SMALL.items()
    },
    "shufflenet, pooled": ("shufflenet", {"width": 0.5, "stem_stride": 4}),
    "cnn-pfl": ("cnn-pfl", {}),
    "lstm": ("lstm", {"hidden": 6, "embedding": 4}),
    "lstm, dropout": ("lstm", {"hidden": 6, "layers": 3, "dropout": 0.3}),
    "vit": ("vit", {"patch": 8, "width": 8, "depth": 2, "heads": 2}),
    "vit, dropout": ("vit", {"patch": 8, "width": 8, "depth": 1, "dropout": 0.3, "augment": True}),
    "gpt": ("gpt", {"width": 8, "depth": 2, "heads": 2}),
    "gpt, dropout": ("gpt", {"width": 8, "depth": 1, "dropout": 0.3, "length": 5}),
}
# BatchNorm over the four numbers of a batch of 1x1 pixels multiplies rounding by up to a million:
# 'loop' itself then
# moves by as much for weights that differ in their last bit. So the last pixels are at least 2x2.
SIDES = {"mobilenet": 17, "shufflenet, pooled": 33}
every_case = pytest.mark.parametrize(
    ("case", "name", "options"), [(c, *CASES[c]) for c in CASES], ids=CASES
)


def problem(case, name, options):
    """A callable that makes the model, and data for it."""
    n = sum(SIZES)
    if name in ("lstm", "gpt"):
        x, y = (labels(n, LENGTH, classes=TOKENS, word=word) for word in (0, 1))
        return lambda: models[name](outputs=TOKENS, **options), ragged(x, y, SIZES)
    side = SIDES.get(case, 16)
    data = ragged(numbers(n, 3, side, side), labels(n, classes=CLASSES), SIZES)
    return lambda: models[name](shape=(3, side, side), outputs=CLASSES, **options), data


@every_case
def test_is_batched_layer_by_layer(case, name, options):
    model, data = problem(case, name, options)
    functional_model = FunctionalModel(model, "cross_entropy", data.y[:1], dtype=torch.float64)
    assert (
        check_stackable(
            functional_model, data.x[:6].unflatten(0, (3, 2)), data.y[:6].unflatten(0, (3, 2))
        ).reason
        is None
    )


@every_case
def test_engines_agree(case, name, options):
    model, data = problem(case, name, options)
    runs = {}
    for engine in ("loop", "vector"):
        federation = runs[engine] = Federation(
            model,
            data,
            FedAvg(lr=0.02),
            modes=1,
            batch_size=BATCH,
            engine=engine,
            dtype=torch.float64,
        )
        start = federation.state.modes["theta"]
        reports = list(federation.rounds(1))
        assert reports[0].losses.isfinite().all()
        assert not torch.equal(start, federation.state.modes["theta"])
    got, expected = (
        {**run.state.modes, "buffers": run.state.buffers} for run in (runs["vector"], runs["loop"])
    )
    assert runs["vector"].engine.notes == []
    require_close(got, expected, f"Engines disagree on {case}")


@pytest.mark.parametrize("case", BATTERY, ids=lambda case: case.name)
def test_so_is_every_case_of_the_battery(case):
    made = Federation(
        case.model,
        case.data(),
        FedAvg(),
        modes=1,
        batch_size=BATCH,
        engine="vector",
        dtype=torch.float64,
        loss=case.settings.get("loss", "cross_entropy"),
    )
    assert made.engine.stacked, made.engine.notes


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(2, 3), (4, 1), (2, 2)])
def test_padding_that_is_not_the_same_on_both_sides(kernel, dilation):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 4, 2, *kernel, generator=generator, dtype=torch.float64)
    expected = [
        F.conv2d(images, w, padding="same", dilation=dilation)
        for images, w in zip(x.chunk(3), weight, strict=True)
    ]
    forward = StackedForward(torch.arange(3), {}, torch.float64)
    got = conv2d(forward, x, weight, padding="same", dilation=dilation)
    torch.testing.assert_close(got, torch.cat(expected))
