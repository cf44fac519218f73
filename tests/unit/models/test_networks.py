"""Architectures: numbers of parameters, shapes, initial weights, and what is refused."""

import math

import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble import InputError
from fedensemble.config.build import build_model
from fedensemble.config.plugin_tables import parameters, schema
from fedensemble.federation.named_models import GIVEN_TO_MODELS
from fedensemble.modeling.factory import ModelSpec
from fedensemble.models import models
from fedensemble.models.transformer import Block

IMAGES = ("resnet18", "resnet20", "mobilenet", "shufflenet", "cnn-pfl")
NORMED = IMAGES[:-1]
CIFAR = {"shape": [3, 32, 32], "outputs": 10}
# Sums of some thousand squares: their relative spread is sqrt(2 / n), so a tenth is many standard
# deviations.
SPREAD, ENOUGH = 0.1, 3000


def size(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def make(name, **options):
    torch.manual_seed(0)
    return models[name](**options)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("resnet18", CIFAR, 11_173_962),
        ("resnet20", CIFAR, 269_722),
        ("mobilenet", CIFAR, 2_236_682),
        ("mobilenet", {**CIFAR, "outputs": 1000}, 3_504_872),  # torchvision's
        ("shufflenet", CIFAR, 1_263_854),
        # torchvision's, and the other widths
        ("shufflenet", {**CIFAR, "outputs": 1000}, 2_278_604),
        ("shufflenet", {**CIFAR, "outputs": 1000, "width": 0.5}, 1_366_792),
        ("shufflenet", {**CIFAR, "outputs": 1000, "width": 1.5}, 3_503_624),
        ("shufflenet", {**CIFAR, "outputs": 1000, "width": 2.0}, 7_393_996),
        ("cnn-pfl", CIFAR, 1_626_442),
        # 820,522 of Reddi et al. and a second bias of 4 * 256 in both layers
        ("lstm", {"outputs": 90}, 822_570),
        ("lstm", {"outputs": 97}, 798_720 + 265 * 97),
        ("vit", CIFAR, 809_354),
        ("gpt", {"outputs": 90}, 793_344 + 128 * (90 + 256)),
        ("cnn", {"shape": [1, 28, 28], "outputs": 10}, 21_840),
        ("wide", {"shape": [2], "outputs": 3, "width": 7, "depth": 2}, 21 + 56 + 24),
        ("wide", {"shape": [2], "outputs": 1, "width": 7, "bias_scale": 0.0}, 14 + 7),
    ],
)
def test_number_of_parameters(name, given, expected):
    with torch.device("meta"):
        assert size(models[name](**given)) == expected


@pytest.mark.parametrize("name", NORMED)
def test_group_norm_has_as_many_parameters_and_no_statistics(name):
    with torch.device("meta"):
        batch, group = (models[name](**CIFAR, norm=norm) for norm in ("batch", "group"))
    assert size(batch) == size(group)
    assert list(batch.buffers()) and not list(group.buffers())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in group.modules())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 64, 64), (3, 17, 22)], ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_images_give_a_number_a_class(name, shape):
    with torch.device("meta"):
        assert models[name](shape=shape, outputs=7)(torch.empty(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [
        ("resnet18", {}, 4),
        ("resnet20", {}, 8),
        ("mobilenet", {}, 2),
        ("mobilenet", {"stem_stride": 2}, 1),
    ]
    + [("shufflenet", {"stem_stride": stride}, 4 // stride) for stride in (1, 2, 4)],
)
def test_pixels_left_of_32(name, options, side):
    seen = []
    with torch.device("meta"):
        model = models[name](**CIFAR, **options)
        last = getattr(model, "blocks", None) or model.layers
        last.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape[2:])))
        model(torch.empty(2, 3, 32, 32))
    assert seen == [(side, side)]


@pytest.mark.parametrize(
    ("name", "options"),
    [("lstm", {"hidden": 8, "layers": 2}), ("gpt", {"width": 8, "depth": 2, "heads": 2})],
)
def test_language_models_give_logits_at_every_position_and_do_not_look_ahead(name, options):
    model = make(name, outputs=6, **options).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = tokens.clone()
    changed[0, 3] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 5, 6)
    same = (before == after).all(-1)[0].tolist()
    assert same == [True, True, True, False, False]


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "mobilenet"])
def test_convolutions_start_with_two_over_fan_out(name):
    model = make(name, **CIFAR)
    large = [
        m.weight for m in model.modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > ENOUGH
    ]
    assert large
    for weight in large:
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        assert weight.square().mean().item() == pytest.approx(2 / fan_out, rel=SPREAD)


def test_glorot_weights_of_the_benchmark_network():
    for layer in make("cnn-pfl", **CIFAR).layers:
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.weight.numel() > ENOUGH:
            field = math.prod(layer.weight.shape[2:])
            limit = math.sqrt(6 / (field * (layer.weight.shape[0] + layer.weight.shape[1])))
            assert limit * 0.99 < layer.weight.abs().max() <= limit


def test_mobilenet_starts_undecided():
    out = make("mobilenet", **CIFAR).out
    assert out.weight.std().item() == pytest.approx(0.01, rel=SPREAD)
    assert not out.bias.any()


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", NORMED)
def test_first_logits_and_gradients_are_of_sensible_size(name, norm):
    model = make(name, shape=[3, 16, 16], outputs=10, norm=norm)
    logits = model(torch.randn(16, 3, 16, 16))
    loss = nn.functional.cross_entropy(logits, torch.arange(16) % 10)
    loss.backward()
    assert loss.item() < 2 * math.log(10)
    slopes = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    assert slopes.isfinite().all() and slopes.max() < 100
    assert (slopes > 0).all()  # nothing is cut off


def test_shortcut_of_resnet20_takes_every_second_pixel_and_adds_zeros():
    block = make("resnet20", **CIFAR).blocks[3]
    nn.init.zeros_(block.second_norm.weight)  # only the shortcut is left
    x = torch.rand(2, 16, 6, 6)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert out.shape == (2, 32, 3, 3) and not out[:, 16:].any()


@pytest.mark.parametrize("name", NORMED)
def test_examples_do_not_meet_without_batch_norm(name):
    options = {"width": 0.5} if name in ("mobilenet", "shufflenet") else {"width": 4}
    model = make(name, shape=[3, 16, 16], outputs=3, norm="group", **options).double().eval()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
    # float64 sums in another order
    torch.testing.assert_close(model(x), alone, rtol=1e-10, atol=1e-10)


def test_dropout_of_resnet20_adds_no_parameters_and_is_between_the_convolutions_of_a_block():
    shape = {"shape": [3, 8, 8], "outputs": 3, "norm": "group", "width": 4}
    plain, dropped = (make("resnet20", **shape, **more) for more in ({}, {"dropout": 0.25}))
    dropped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(dropped.eval()(x), plain.eval()(x), rtol=0, atol=0)
    layers = [module for module in dropped.modules() if isinstance(module, nn.Dropout)]
    assert len(layers) == 9 and {layer.p for layer in layers} == {0.25}
    inputs, block = [], dropped.blocks[0]
    block.second.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    x = torch.randn(8, 4, 8, 8)
    block.eval()(x), block.train()(x)
    whole, kept = inputs
    active = whole > 0
    ratio = (kept / whole)[active]
    is_kept = torch.isclose(ratio, torch.tensor(4 / 3))
    assert bool((is_kept | (ratio == 0)).all())
    assert abs(float(is_kept.double().mean()) - 0.75) < 5 * (0.25 * 0.75 / len(ratio)) ** 0.5


@pytest.mark.parametrize("name", [*IMAGES, "vit", "lstm", "gpt"])
def test_every_option_is_a_key_of_a_config(name):
    known = parameters(models[name], GIVEN_TO_MODELS)
    table = schema("model", known)().model_dump()
    # None: an option that came later, which configs without it do not hash.
    assert all(value is None or isinstance(value, int | float | str) for value in table.values())
    with torch.device("meta"):
        build_model({**table, "name": name}, CIFAR)()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet18",
            {"shape": [64]},
            r"needs images of shape \(channels, height, width\); got \(64,\)",
        ),
        ("resnet18", {"norm": "layer"}, "norm is 'batch' or 'group'; got 'layer'"),
        ("resnet20", {"norm": "group", "groups": 3}, "cannot divide 16 channels into groups=3"),
        ("resnet20", {"width": 0}, "needs width > 0; got 0"),
        ("mobilenet", {"stem_stride": 0}, "needs stem_stride > 0"),
        ("shufflenet", {"width": 0.7}, "width 0.5, 1.0, 1.5, 2.0; got 0.7"),
        ("shufflenet", {"stem_stride": 3}, "stem_stride 1, 2 or 4; got 3"),
        ("cnn-pfl", {"shape": [3, 5, 8]}, "at least 6x6; got 5x8"),
        ("vit", {"shape": [64]}, "needs images of shape"),
        ("vit", {"patch": 5}, "patches of 5x5, which must divide the image: got 32x32"),
        ("vit", {"patch": 0}, "integers of at least 1 in patch; got 0"),
        ("vit", {"heads": 3}, "its heads divide; got width=128, heads=3"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        models[name](**{**CIFAR, **options})


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_block_is_torchs(causal):
    """With the weights of torch's layer, which has the same parts under other names."""
    torch.manual_seed(0)
    block = Block(8, 2, 0.0, causal).double()
    layer = nn.TransformerEncoderLayer(
        8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "first_norm": "norm1",
        "second_norm": "norm2",
        "in_projection.": "self_attn.in_proj_",
        "out_projection": "self_attn.out_proj",
        "expand": "linear1",
        "contract": "linear2",
    }
    state = block.state_dict()
    for ours, torchs in names.items():
        state = {name.replace(ours, torchs): value for name, value in state.items()}
    layer.load_state_dict(state)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = layer(x, src_mask=mask if causal else None)
    torch.testing.assert_close(block(x), expected)


def test_transformers_start_small_before_their_shortcuts():
    model = make("gpt", outputs=90, depth=8)
    weights = dict(model.named_parameters())
    for name, std in (("expand", 0.02), ("contract", 0.02 / 4), ("out_projection", 0.02 / 4)):
        found = weights[f"blocks.3.{name}.weight"].std().item()
        assert found == pytest.approx(std, rel=SPREAD)
    assert weights["positions"].std().item() == pytest.approx(0.02, rel=SPREAD)
    assert bool((weights["norm.weight"] == 1).all() and (weights["norm.bias"] == 0).all())


def test_sequences_that_are_too_long_are_refused():
    model = make("gpt", outputs=6, width=8, depth=1, length=4)
    with pytest.raises(InputError, match=r"positions for 4 tokens; got a sequence of 5"):
        model(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("options", [{"layers": 0}, {"hidden": 0}, {"layers": 1, "dropout": 0.1}])
def test_lstm_refuses(options):
    with pytest.raises(InputError, match="Model 'lstm'"):
        models["lstm"](outputs=5, **options)


@pytest.mark.parametrize(("name", "shape"), [("rbf", (5, 1)), ("wide", (5, 2))])
def test_a_mode_as_a_module_predicts_as_the_ensemble(name, shape):
    """Also if the model has a non-persistent buffer, as the centres of `rbf`."""
    options = {} if name == "rbf" else {"shape": [2], "outputs": 1, "width": 6}
    x, y = torch.randn(2, *shape), torch.randn(2, 5, 1)
    federation = fe.Federation(
        ModelSpec(models[name], options),
        fe.FederatedData.from_clients(list(zip(x, y, strict=True))),
        modes=2,
        loss="mse",
        engine="loop",
    )
    expected = federation.ensemble.predict(x[0]).modes
    for mode in range(2):
        with torch.no_grad():
            assert torch.allclose(federation.ensemble.module(mode)(x[0]), expected[mode])


def test_wide_is_stacked():
    check_stacked = fe.Federation(
        ModelSpec(models["wide"], {"shape": [2], "outputs": 1, "width": 6}),
        fe.FederatedData.from_clients([(torch.randn(3, 2), torch.randn(3, 1))] * 2),
        loss="mse",
        engine="vector",
    )
    assert not check_stacked.engine.notes  # such as "using vmap, which is slower"
