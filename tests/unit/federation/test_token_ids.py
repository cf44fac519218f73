"""Token ids outside the model's embedding raise before training and name their client."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FederatedData, Federation, InputError
from fedensemble.federation import token_ids
from fedensemble.federation.token_ids import extreme_rows


def examples(count, bad=None, row=None):
    x = torch.zeros(count, 2, dtype=torch.int64)
    x[:, 1] = 1
    if bad is not None:
        x[count // 2 if row is None else row, 1] = bad
    return x, torch.zeros(count, dtype=torch.int64)


def reader():
    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))


class OneHot(nn.Module):
    """Takes tokens 0 to 4 without an embedding, and only four examples or more at once."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        if len(x) < 4:
            raise ValueError("too few")
        return self.out(F.one_hot(x, 5).flatten(1).to(self.out.weight.dtype))


class Table(nn.Module):
    """Each example is one value and one category."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return self.table(x[:, 1]) * x[:, :1]


class FromOne(nn.Module):
    """Has tokens 1 to 5."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return self.table(x - 1).mean(1)


def train(model, clients, engine, **more):
    data = FederatedData.from_clients(clients, classes=3, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return next(
            Federation(model, data, modes=3, strata=1, batch_size=4, engine=engine).rounds(1)
        )


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(("bad", "highest"), [(6, 6), (-1, 1)])
def test_a_client_with_an_unknown_token(engine, bad, highest):
    with pytest.raises(InputError) as raised:
        train(reader, [examples(9), examples(121, bad)], engine)
    assert str(raised.value) == (
        f"The model embeds 5 tokens, 0 to 4, but row 60 of client 1 holds {bad} "
        f"(the largest value there is {highest}). Enlarge the embedding, or renumber the tokens."
    )


def test_clients_by_name_and_a_client_alone():
    with pytest.raises(InputError, match=r"row 2 of client 1 \(ann\) holds 6"):
        train(reader, [examples(4), examples(4, 6)], "loop", names=("bob", "ann"))
    with pytest.raises(InputError, match="row 2 of the clients' data holds 6"):
        train(reader, [examples(4, 6)], "loop")


def test_the_last_token_is_fine():
    train(reader, [examples(4), examples(4, 4)], "vector")


def test_unknown_tokens_in_test_data_and_server_data():
    x, y = examples(40, 5, row=7)
    with pytest.raises(InputError, match="but row 7 of the test data holds 5"):
        train(reader, [examples(4)], "vector", x_test=x, y_test=y)
    with pytest.raises(InputError, match="but row 7 of x_server holds 5"):
        train(reader, [examples(4)], "vector", x_server=x)


def test_every_row_is_bad():
    with pytest.raises(InputError, match="embeds 5 tokens"):
        train(reader, [(torch.full((6, 2), 9), [0] * 6)], "loop")


def test_tokens_without_an_embedding():
    train(OneHot, [examples(40)], "loop")
    with pytest.raises(
        InputError, match=r"fails where row 20 of .* holds 7 .*: Class values must be smaller"
    ):
        train(OneHot, [examples(40, 7)], "loop")


def test_the_message_names_the_value_that_fails():
    numbers = torch.tensor([[40, 1], [30, 2], [50, 4], [20, 3]])
    train(Table, [(numbers, [0, 1, 2, 0])], "loop")
    numbers[3, 1] = 6
    with pytest.raises(InputError, match=r"row 3 of .* holds 6 \(the largest value there is 50\)"):
        train(Table, [(numbers, [0, 1, 2, 0])], "loop")


def test_tokens_that_start_elsewhere():
    tokens = torch.tensor([[1, 2], [5, 3], [4, 4]])
    train(FromOne, [(tokens, [0, 1, 2])], "loop")
    tokens[1, 1] = 0
    with pytest.raises(InputError, match=r"fails where row 1 of .* holds 0 .*: index out of range"):
        train(FromOne, [(tokens, [0, 1, 2])], "loop")


class Small(nn.Linear):
    """Accepts only rows with small sums."""

    def forward(self, x):
        if x.sum(1).max() > 10:
            raise ValueError("too much")
        return super().forward(x.to(self.weight.dtype))


def test_rows_that_fail_without_a_single_bad_value():
    tokens = torch.tensor([[1, 2], [3, 3], [6, 7]])
    with pytest.raises(
        InputError, match="takes other rows, but not row 2 of the clients' data: too much"
    ):
        train(lambda: Small(2, 3), [(tokens, [0, 1, 2])], "loop")


def test_models_that_take_no_integers():
    with pytest.raises(InputError, match="Give x as floats"):
        train(lambda: nn.Linear(2, 3), [examples(4)], "loop")


@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_extremes_of_every_position(monkeypatch, chunk):
    monkeypatch.setattr(token_ids, "_CHUNK", chunk)
    x = torch.randint(-50, 50, (500, 2, 5), generator=torch.Generator().manual_seed(0))
    few = x[extreme_rows(x)]
    assert len(few) <= 20
    assert torch.equal(few.amax(0), x.amax(0))
    assert torch.equal(few.amin(0), x.amin(0))


def test_the_most_extreme_rows_of_many_positions():
    x = torch.randint(0, 1000, (3000, 1500), generator=torch.Generator().manual_seed(0))
    x[1234, 77], x[4, 1400] = 1000, -1
    rows = extreme_rows(x)
    assert len(rows) <= 8
    assert {4, 1234} <= set(rows.tolist())
    assert extreme_rows(torch.tensor([3, 1, 2], dtype=torch.uint8)).tolist() == [0, 1]
