"""The greedy order of modes against brute force, and the rows that it is computed from."""

import pytest
import torch
from tests.unit.export.test_models import ensemble
from torch import nn

import fedensemble as fe
from fedensemble import InputError
from fedensemble.export.mode_ranking import parse_modes
from fedensemble.testing.toy_problems import labels, numbers


def made(**options):
    return ensemble(lambda: nn.Linear(4, 3), (4,), modes=5, **options)


def rows(classes=3):
    return numbers(40, 4, word=3).float(), labels(40, classes=classes)


def greedy(evaluate, modes):
    """The order by brute force: every ensemble is built and evaluated by itself."""
    order = []
    while len(order) < modes:
        left = [mode for mode in range(modes) if mode not in order]
        order.append(min(left, key=lambda mode: evaluate([*order, mode])))
    return order


@pytest.mark.parametrize("combine", ["probabilities", "logits"])
@pytest.mark.parametrize("samples", [1, 2])
def test_greedy_order(combine, samples):
    one, (x, y) = made(combine=combine, samples=samples), rows()

    def measure(modes):
        return fe.evaluate(one.select(modes).predict(x), y)

    ranking = one.rank_modes(x, y)
    assert list(ranking.order) == greedy(lambda modes: measure(modes)["nll"], 5)
    for size, metrics in enumerate(ranking.metrics, 1):
        expected = measure(list(ranking.order[:size]))
        assert metrics["accuracy"] == expected["accuracy"]
        assert metrics["nll"] == pytest.approx(expected["nll"], rel=1e-5)


def test_greedy_order_for_regression():
    one = ensemble(lambda: nn.Linear(4, 2), (4,), modes=4, loss="mse")
    x, y = numbers(30, 4, word=4).float(), numbers(30, 2, word=5)
    ranking = one.rank_modes(x, y)
    assert list(ranking.order) == greedy(
        lambda modes: fe.evaluate(one.select(modes).predict(x), y)["mse"], 4
    )
    assert set(ranking.metrics[0]) == {"mse"}


def test_a_selection_predicts_with_its_modes_alone():
    one, (x, _) = made(samples=2), rows()
    every, part = one.predict(x), one.select([3, 1]).predict(x)
    torch.testing.assert_close(part.members, every.members[[6, 7, 2, 3]])
    assert len(one) == 5 and len(one.select([3, 1])) == 2


@pytest.mark.parametrize("modes", [[], [5], [-1], [0, 0], ["0"], [True]])
def test_selections_that_do_not_exist(modes):
    with pytest.raises(InputError, match="different modes from 0 to 4"):
        made().select(modes)


def test_the_best_modes_are_written(tmp_path):
    one, (x, y) = made(), rows()
    file = one.export(tmp_path / "m.pt2", modes="best:2", validation=(x, y))
    assert file.models == 2
    best = one.rank_modes(x, y).best(2)
    assert file.ranking == one.rank_modes(x, y) and set(best) == set(file.ranking.order[:2])
    outputs = torch.export.load(tmp_path / "m.pt2").module()(x)
    torch.testing.assert_close(outputs["mean"], one.select(best).predict(x).mean)
    assert one.export(tmp_path / "m.pt2", modes=[4, 0]).models == 2
    lines = str(file.ranking).splitlines()
    assert len(lines) == 6 and lines[0].split() == ["modes", "mode", "added", "NLL", "accuracy"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modes": "best:2"}, r"needs rows to choose by: validation=\(x, y\)"),
        ({"modes": "best:6", "validation": rows()}, "the best 1 to 5 of them.*got 6"),
        ({"modes": "best"}, "'best:3' for the best three"),
        ({"modes": "best:1,2"}, "'best:3' for the best three"),
        ({"modes": "0,7"}, "different modes from 0 to 4"),
        ({"modes": "best:2", "validation": (rows()[0], labels(40, classes=9))}, "up to 8"),
    ],
)
def test_mistakes(options, says, tmp_path):
    with pytest.raises(InputError if "up to" not in says else fe.DataError, match=says):
        made().export(tmp_path / "m.pt2", **options)
    assert not list(tmp_path.iterdir())


def test_numbers_of_modes():
    for text, modes in (("best:12", 12), ("3", (3,)), ("0, 2", (0, 2))):
        assert parse_modes(text) == modes
