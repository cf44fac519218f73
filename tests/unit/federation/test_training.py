"""train, rounds, evaluate and predict, and what results look like."""

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import nn

import fedensemble as fe
from fedensemble.data.dataset import Dataset, datasets
from fedensemble.data.dataset import load as load_dataset
from fedensemble.data.partitioning.partition import partition
from fedensemble.federation.named_models import build_model, describe_model
from fedensemble.federation.progress import progress_bar
from fedensemble.models import MLP, models

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
NAMES = ["<b>yes</b>" if row.sum() > 0 else "no" for row in X]
DATA = fe.FederatedData.from_arrays(X[:40], NAMES[:40], [10] * 4, x_test=X[40:], y_test=NAMES[40:])


def federation(**options: object) -> fe.Federation:
    return fe.Federation(lambda: nn.Linear(3, 2), DATA, modes=2, **options)


def test_train_returns_reports_and_records_tests():
    trained, by_hand = federation(), federation()
    reports = trained.train(5, test_every=2)
    assert [report.round for report in reports] == [1, 2, 3, 4, 5]
    expected = []
    for report in by_hand.rounds(5):
        if report.round in (2, 4, 5):
            prediction = by_hand.ensemble.predict(X[40:])
            expected.append((report.round, fe.evaluate(prediction, NAMES[40:])))
    records = trained.history.records
    assert [(r["round"], r["test"]) for r in records if "test" in r] == expected
    assert [r["loss"] for r in records] == [report.loss for report in reports]
    assert torch.equal(trained.ensemble.theta, by_hand.ensemble.theta)


@pytest.mark.parametrize("count", [0, 3])
def test_a_callback_stops_training(count):
    trained, seen = federation(), []
    reports = trained.train(9, lambda report: seen.append(report) or report.round == count)
    assert seen == reports and trained.round == len(reports) == (3 if count else 9)


def test_an_error_in_a_callback_is_passed_on_after_its_round():
    trained = federation()
    with pytest.raises(ZeroDivisionError):
        trained.train(3, lambda report: 1 / (2 - report.round))
    assert trained.round == 2 == len(trained.history.records)


def test_a_truthy_result_that_is_not_true_does_not_stop():
    """As of `list.append` in an expression, or a callback that returns its report."""
    assert len(federation().train(3, lambda report: report)) == 3


def test_rounds_that_nobody_takes_warn():
    trained = federation()
    with pytest.warns(fe.UntrainedWarning, match=r"call train\(20\)"):
        trained.rounds(20)  # deleted at once: nothing refers to it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(trained.rounds(20))  # stopped early, on purpose
        list(trained.rounds(0))
        trained.rounds(0)
    assert trained.round == 1
    with pytest.raises(fe.InputError, match="count to be an integer"):
        trained.rounds(1.5)


def test_untrained_modes_warn():
    new = federation()
    with pytest.warns(fe.UntrainedWarning, match="untrained"):
        new.predict(X)
    with pytest.warns(fe.UntrainedWarning, match="untrained"):
        new.evaluate()
    new.train(1)
    new.predict(X)


def test_evaluate():
    trained = federation()
    trained.train(3)
    metrics = trained.evaluate()
    assert trained.history.records[-1]["test"] == metrics
    assert trained.evaluate(X[40:], NAMES[40:]) == metrics
    assert trained.evaluate(X[:40], NAMES[:40]) != metrics
    assert trained.history.records[-1]["test"] == metrics, "other data are not recorded"
    with pytest.raises(fe.InputError, match="both inputs and targets"):
        trained.evaluate(X)
    alone = fe.Federation(
        lambda: nn.Linear(3, 2), fe.FederatedData.from_arrays(X, NAMES, [30, 30]), modes=2
    )
    with pytest.raises(fe.InputError, match="no test set"):
        alone.train(3, test_every=1)
    assert alone.round == 0


def test_nothing_is_printed_in_a_log_and_a_bar_on_a_terminal():
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        federation().train(2)
    assert out.getvalue() == errors.getvalue() == ""
    drawn = io.StringIO()
    with progress_bar(2, Console(file=drawn, force_terminal=True, width=100)) as show:
        show([{"round": 1, "loss": 0.5}])
        show([{"round": 1, "loss": 0.5, "test": {"accuracy": 0.25}}, {"round": 2, "loss": 0.25}])
    assert "2/2" in drawn.getvalue() and "loss 0.250  accuracy 25.00 %" in drawn.getvalue()


def test_results_show_themselves_without_tensors():
    trained = federation()
    report = trained.train(3)[-1]
    prediction, ensemble = trained.predict(X), trained.ensemble
    assert repr(prediction).startswith("Prediction(60 examples, 2 classes, 2 modes, mean entropy ")
    assert repr(ensemble) == (
        "Ensemble(2 modes, 8 parameters each, classification, inputs (3,), classes <b>yes</b>, no)"
    )
    averaged = federation(average=fe.Snapshots(count=3))
    averaged.train(4)
    assert repr(averaged.ensemble).startswith("Ensemble(2 modes with 6 models, 8 parameters each, ")
    assert repr(report).startswith("RoundReport(round 3, age 2, loss 0.")
    for shown in (prediction, ensemble, trained, report):
        assert "tensor" not in repr(shown) and "\n" not in repr(shown)
        page = shown._repr_html_()
        assert page.startswith("<table>") and "tensor" not in page and "<b>" not in page
    counts = torch.bincount(prediction.label)
    yes = f"<th>predicted &lt;b&gt;yes&lt;/b&gt;</th><td>{int(counts[0])} ("
    assert yes in prediction._repr_html_()
    assert f"{trained.evaluate()['accuracy']:.4g} (round 3)" in trained._repr_html_()


def test_regression_and_sequences_show_themselves():
    mean = torch.tensor([[1.0], [2.0], [4.0]])
    members = torch.stack([mean - 1, mean + 1])
    regression = fe.Prediction(mean, members, "regression", "outputs")
    # The unbiased standard deviation of -1 and 1 is the square root of 2.
    assert repr(regression) == "Prediction(3 examples, 1 output, 2 modes, mean spread 1.41)"
    text = torch.full((4, 5, 8), 1 / 8)
    sequence = fe.Prediction(text, text.unsqueeze(0))
    # 20 predictions, each with entropy log 8 = 2.079
    assert repr(sequence) == "Prediction(20 examples, 8 classes, 1 mode, mean entropy 2.079 nats)"
    assert "<td>4 x 5</td>" in sequence._repr_html_()


FACTS = {"shape": [3], "outputs": 2}


def test_registered_models_are_described_and_built_again():
    table = {"name": "mlp", "hidden": [7]}
    assert describe_model(build_model(table, FACTS), FACTS) == table
    assert describe_model(partial(MLP, (3,), 2), FACTS) is None, "positional arguments"
    assert describe_model(partial(MLP, shape=(3,), outputs=2), FACTS) == {"name": "mlp"}
    assert describe_model(partial(MLP, shape=(3,), outputs=5), FACTS) is None
    assert describe_model(lambda: nn.Linear(3, 2), FACTS) is None
    by_name = fe.Federation({"name": "mlp", "hidden": [7]}, DATA, modes=2)
    by_class = fe.Federation(partial(models["mlp"], (3,), 2, hidden=[7]), DATA, modes=2)
    assert torch.equal(by_name.ensemble.theta, by_class.ensemble.theta)
    with pytest.raises(fe.InputError, match="unknown option of model 'mlp' 'hiden'"):
        fe.Federation({"name": "mlp", "hiden": [7]}, DATA)
    with pytest.raises(fe.InputError, match="unknown model 'mpl': did you mean 'mlp'"):
        fe.Federation("mpl", DATA)
    with pytest.raises(fe.InputError, match="needs its name"):
        fe.Federation({"hidden": [7]}, DATA)


def test_recipes_of_data():
    source = load_dataset("gaussians", n=60, classes=3)
    made = partition(source, "iid", clients=4, seed=2).recipe
    accepts_seed = "seed" in datasets["gaussians"].__code__.co_varnames
    # A config has one seed for both; this dataset was made with another one.
    assert accepts_seed and made is None
    same = partition(load_dataset("gaussians", n=60, classes=3, seed=2), "iid", clients=4, seed=2)
    assert same.recipe == {
        "source": "gaussians",
        "n": 60,
        "classes": 3,
        "partition": "iid",
        "clients": 4,
        "seed": 2,
    }
    by_hand = Dataset(x=X, y=torch.zeros(60, dtype=torch.int64), classes=1)
    assert by_hand.recipe is None and partition(by_hand, "iid", clients=3).recipe is None
    assert DATA.recipe is None
