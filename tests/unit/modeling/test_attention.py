"""Attention in elementary operations: equal to torch's, with keyed dropout of its weights."""

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import prng
from fedensemble.modeling import attention as own_attention
from fedensemble.modeling.keyed_rng import KeyedRandomness

BATCH, LENGTH, SOURCE, SIZE, HEADS = 3, 5, 4, 8, 2
KEY = prng.key(0, "test")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def keyed(function, *args, **kwargs):
    with KeyedRandomness(KEY):
        return function(*args, **kwargs)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.ones(LENGTH, SOURCE, dtype=torch.bool).tril()},
    "a query that attends to nothing": {
        "attn_mask": torch.ones(LENGTH, SOURCE, dtype=torch.bool).tril(-1)
    },
    "summand": {"attn_mask": randn(LENGTH, SOURCE, seed=9)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("dropout", [0.0, 1e-12])  # so small that nothing is dropped
@pytest.mark.parametrize("name", MASKS)
def test_scaled_dot_product_attention_is_torchs(name, dropout):
    q, k, v = (randn(BATCH, HEADS, n, SIZE, seed=n) for n in (LENGTH, SOURCE, SOURCE))
    q.requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v, **MASKS[name])
    got = keyed(F.scaled_dot_product_attention, q, k, v, dropout_p=dropout, **MASKS[name])
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(out.square().sum(), q)[0] for out in (got, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dropout", [0.0, 1e-12])
def test_grouped_queries(dropout):
    q, k, v = (randn(BATCH, heads, LENGTH, SIZE, seed=heads) for heads in (4, 2, 2))
    options = {"enable_gqa": True, "is_causal": True}
    got = keyed(F.scaled_dot_product_attention, q, k, v, dropout_p=dropout, **options)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, **options))


def test_dropout_drops_attention_weights():
    """With values one-hot by position, the output is the matrix of weights after dropout."""
    q = randn(1, 200, SIZE)
    weights = (q @ q.transpose(1, 2) / SIZE**0.5).softmax(-1)
    got = keyed(F.scaled_dot_product_attention, q, q, torch.eye(200)[None].double(), dropout_p=0.3)
    ratio = got / weights
    kept = ratio > 0.5
    torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.7))
    assert bool((got[~kept] == 0).all())
    assert abs(float(kept.double().mean()) - 0.7) < 6 * (0.7 * 0.3 / 200**2) ** 0.5


LAYERS = {
    "plain": {},
    "without bias": {"bias": False},
    "other sizes of key and value": {"kdim": 6, "vdim": 7},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn, batch first": {
        "add_bias_kv": True,
        "add_zero_attn": True,
        "batch_first": True,
    },
}
CALLS = {
    "padding": {
        "key_padding_mask": torch.arange(SOURCE) >= torch.tensor([[4], [2], [3]]),
    },
    "padding and mask": {
        "key_padding_mask": torch.arange(SOURCE) >= torch.tensor([[4], [2], [3]]),
        "attn_mask": torch.ones(LENGTH, SOURCE, dtype=torch.bool).triu(1),
    },
    "mask per head": {"attn_mask": randn(BATCH * HEADS, LENGTH, SOURCE, seed=4)},
    "weights per head": {"average_attn_weights": False},
}


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("layer", "call"), [*itertools.product(LAYERS, CALLS)])
def test_multi_head_attention_is_torchs(layer, call, need_weights):
    torch.manual_seed(0)
    options = LAYERS[layer]
    attention = nn.MultiheadAttention(SIZE, HEADS, dtype=torch.float64, **options)
    k = randn(SOURCE, BATCH, options.get("kdim", SIZE), seed=1)
    v = randn(SOURCE, BATCH, options.get("vdim", SIZE), seed=2)
    inputs = [randn(LENGTH, BATCH, SIZE), k, v]
    inputs = [x.transpose(0, 1) for x in inputs] if options.get("batch_first") else inputs
    kwargs = {**CALLS[call], "need_weights": need_weights}
    results = [f(*inputs, **kwargs) for f in (attention, lambda *a, **k: keyed(attention, *a, **k))]
    grads = [
        torch.autograd.grad(out.square().sum(), list(attention.parameters())) for out, _ in results
    ]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_without_a_batch(need_weights):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(SIZE, HEADS, dtype=torch.float64), randn(LENGTH, SIZE)
    expected = attention(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(keyed(attention, x, x, x, need_weights=need_weights), expected)


def test_dropout_of_multi_head_attention_is_off_in_evaluation():
    attention, x = nn.MultiheadAttention(SIZE, HEADS, dropout=0.5), torch.ones(LENGTH, 1, SIZE)
    training = keyed(attention, x, x, x)[1]
    assert bool((training == 0).any())
    torch.testing.assert_close(keyed(attention.eval(), x, x, x)[1].sum(-1), torch.ones(1, LENGTH))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_attention_by_the_flash_kernel(options, monkeypatch):
    """torch has one for CPUs as well, so that all but the choice of the kernel can be tested."""
    monkeypatch.setattr(own_attention, "_fits_flash", lambda *given: True)
    modes, deterministic = [], own_attention._deterministic_algorithms

    @contextmanager
    def recorded():
        with deterministic():
            modes.append(torch.are_deterministic_algorithms_enabled())
            yield

    monkeypatch.setattr(own_attention, "_deterministic_algorithms", recorded)
    given = [randn(BATCH, HEADS, LENGTH, SIZE, seed=n).requires_grad_() for n in range(3)]
    got = keyed(F.scaled_dot_product_attention, *given, **options)
    assert type(got.grad_fn).__name__ == "_FlashAttentionBackward"
    with monkeypatch.context() as patched:
        patched.setattr(own_attention, "_fits_flash", lambda *given: False)
        expected = keyed(F.scaled_dot_product_attention, *given, **options)
    back = randn(*got.shape, seed=5)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, given, back) for out in (got, expected)))
    assert modes == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_flash_kernel_takes_bf16_on_a_gpu_only():
    assert not own_attention._fits_flash(*[torch.ones(1, 1, 8, 8)] * 3, False)
