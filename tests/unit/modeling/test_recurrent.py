"""Recurrent layers agree with torch's, also with projections, and packed on engine 'loop'."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedensemble import FedAvg, Federation, InputError, prng
from fedensemble.modeling.keyed_rng import KeyedRandomness
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import SIZES, labels, ragged, train

LENGTH, TOKENS = 5, 7


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_projections(bias, bidirectional):
    torch.manual_seed(0)
    layers = nn.LSTM(
        3, 6, 2, bias=bias, batch_first=True, bidirectional=bidirectional, proj_size=2
    ).double()
    x = torch.randn(4, LENGTH, 3, dtype=torch.float64)
    expected, states = layers(x)
    with KeyedRandomness(prng.key(0, "test")):
        got, others = layers(x)
    for a, b in ((got, expected), *zip(others, states, strict=True)):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


class Text(nn.Module):
    """Classifies token sequences; if `packed`, token 0 ends a sequence, and none is empty."""

    def __init__(self, kind=nn.LSTM, packed=False, **options):
        super().__init__()
        self.embedding, self.packed = nn.Embedding(TOKENS, 3), packed
        self.layers = kind(3, 4, batch_first=True, **options)
        self.out = nn.Linear(options.get("proj_size") or 4, 3)

    def forward(self, x):
        hidden = self.embedding(x)
        if self.packed:
            lengths = 1 + (x != 0).cumprod(1).sum(1).clamp(max=LENGTH - 1)
            hidden = pack_padded_sequence(
                hidden, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
        hidden = self.layers(hidden)[0]
        return self.out(
            (pad_packed_sequence(hidden, batch_first=True)[0] if self.packed else hidden).sum(1)
        )


def texts():
    return ragged(labels(sum(SIZES), LENGTH, classes=TOKENS), labels(sum(SIZES)))


def federation(model, engine):
    return Federation(
        model,
        texts(),
        FedAvg(lr=0.1),
        modes=2,
        strata=2,
        batch_size=3,
        engine=engine,
        dtype=torch.float64,
    )


def test_engines_agree_on_projections():
    made = [
        federation(lambda: Text(proj_size=2, num_layers=2, dropout=0.3), engine)
        for engine in ("loop", "vector")
    ]
    assert made[1].engine.stacked
    loop, vector = (train(each, 3).tensors() for each in made)
    require_close(vector, loop, "engine 'vector'")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_are_trained_as_in_torch(kind):
    made = federation(lambda: Text(kind, packed=True, num_layers=2), "loop")
    functional_model, data = made.model, made.data
    theta, buffers = (rows[0] for rows in functional_model.init_params(3, 1))
    weight, key = torch.ones(len(data.x), dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    gradient, (loss, _) = functional_model.gradient_function(batched=False)(
        theta, buffers, data.x, data.y, weight, key
    )
    model = copy.deepcopy(functional_model.eval_model).train()
    with torch.no_grad():
        for name, value in functional_model.theta_layout.unflatten(theta).items():
            model.get_parameter(name).copy_(value)
    expected = nn.functional.cross_entropy(model(data.x), data.y)
    expected.backward()
    require_close(
        {"gradient": gradient, "loss": loss.reshape(1)},
        {
            "gradient": functional_model.theta_layout.flatten(
                {name: p.grad for name, p in model.named_parameters()}
            ),
            "loss": expected.detach().reshape(1),
        },
        "engine 'loop'",
    )
    before = made.state.modes["theta"].clone()
    assert not torch.equal(train(made, 2).state.modes["theta"], before)


def test_packed_sequences_need_engine_loop():
    with pytest.raises(InputError, match=r"many clients at once: .*Use engine 'loop', which can"):
        federation(lambda: Text(packed=True), "vector")


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_dropout_between_packed_layers_is_rejected(engine):
    with pytest.raises(InputError, match="Dropout between the layers of packed sequences"):
        federation(lambda: Text(packed=True, num_layers=2, dropout=0.3), engine)
