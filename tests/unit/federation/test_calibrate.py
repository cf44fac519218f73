"""Federation.calibrate: equal to a calibration with all rows in one place."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

import fedensemble as fe
from fedensemble import InputError
from fedensemble.data import load, partition
from fedensemble.data.client_rows import ClientRows
from fedensemble.federation.calibration import SimulatedClients, calibration_facts
from fedensemble.testing.toy_problems import numbers
from fedensemble.uncertainty.calibration import Calibration
from fedensemble.uncertainty.calibration_client import CalibrationClient, rows_salt
from fedensemble.uncertainty.calibration_server import CalibrationFacts, fit_calibration
from fedensemble.uncertainty.calibration_settings import CalibrationSettings
from fedensemble.uncertainty.conformal_scores import class_scores
from fedensemble.uncertainty.conformal_threshold import conformal_rank, conformal_threshold


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def rows(count: int, word: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = numbers(count, 4, word=word)
    noisy = x[:, :3] + 0.7 * numbers(count, 3, word=word + 1)
    return x, noisy.argmax(-1)


def made(modes: int = 3, calibration: float = 0.4, rounds: int = 5, **options) -> fe.Federation:
    x, y = rows(600, 1)
    data = fe.FederatedData.from_arrays(x, y, [30, 70, 100, 200, 50, 150])
    if calibration:
        data = data.with_calibration(calibration)
    federation = fe.Federation(net, data, fe.FedAvg(lr=0.5), modes=modes, epochs=3, **options)
    federation.train(rounds)
    return federation


@pytest.fixture(scope="module")
def federation() -> fe.Federation:
    return made()


@pytest.mark.parametrize("combine", ["probabilities", "logits"])
@pytest.mark.parametrize("modes", [1, 3])
def test_temperatures_are_those_of_all_rows_together(modes, combine):
    federation = made(modes, combine=combine)
    held = federation.data.calibration
    raw = federation.ensemble.outputs(held.x).double()
    log_p = raw.log_softmax(-1)
    mean = raw.mean((0, 1)) if combine == "logits" else log_p.exp().mean((0, 1)).log()

    def best(logits: torch.Tensor) -> float:
        def nll(s: float) -> float:
            return float(nn.functional.cross_entropy(logits * math.exp(-s), held.y))

        return math.exp(minimize_scalar(nll, bounds=(-2, 3), method="bounded").x)

    calibrated = federation.calibrate(method="none", temperature="mean", abstain=[])
    assert calibrated.temperatures == pytest.approx((best(mean),), rel=1e-4)
    before = fe.evaluate(federation.uncalibrated.predict(held.x), held.y)["nll"]
    after = fe.evaluate(federation.predict(held.x), held.y)["nll"]
    assert calibrated.nll == pytest.approx((before, after), rel=1e-5) and after < before
    of_members = federation.calibrate(method="none", temperature="member", abstain=[])
    assert of_members.temperatures == pytest.approx([best(mode[0]) for mode in raw], rel=1e-4)
    after = fe.evaluate(federation.predict(held.x), held.y)["nll"]
    assert of_members.nll == pytest.approx((before, after), rel=1e-5)
    chosen = federation.calibrate(method="none", temperature="auto", abstain=[])
    assert chosen.nll[1] == pytest.approx(min(calibrated.nll[1], of_members.nll[1]))
    if modes == 1:  # one member is the mean
        assert of_members.temperatures == pytest.approx(calibrated.temperatures)


@pytest.mark.parametrize("scope", ["mixture", "pool"])
@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("randomized", [False, True])
def test_thresholds_are_those_of_all_rows_together(federation, method, scope, randomized):
    federation.calibrate(0.2, method=method, scope=scope, randomized=randomized, temperature="none")
    made, held = federation.calibration, federation.data.calibration
    probabilities = federation.predict(held.x).mean
    scores = class_scores(probabilities, method, randomized=randomized)
    own = scores.gather(1, held.y.unsqueeze(1))
    exact = conformal_threshold(own, 0.2, clients=6 if scope == "pool" else 1)
    assert exact <= made.thresholds[0] <= exact + 1.01e-3
    new, _ = rows(50, 7)
    prediction = federation.predict(new)
    expected = class_scores(prediction.mean, method, randomized=randomized) <= made.thresholds[0]
    assert torch.equal(prediction.sets, expected)
    assert prediction.sets.shape == (50, 3)
    names = [{int(name) for name in names} for names in prediction.set_names]
    assert names == [set(row.nonzero().flatten().tolist()) for row in expected]


def test_thresholds_of_classes(federation):
    made = federation.calibrate(0.2, scope="class", temperature="none")
    held = federation.data.calibration
    scores = 1 - federation.predict(held.x).mean.double()
    for label, threshold in enumerate(made.thresholds):
        exact = conformal_threshold(scores[held.y == label, label], 0.2)
        assert exact <= threshold <= exact + 1e-3
    new, _ = rows(50, 7)
    prediction = federation.predict(new)
    limits = torch.tensor(made.thresholds, dtype=torch.double)
    assert torch.equal(prediction.sets, 1 - prediction.mean.double() <= limits)


def test_thresholds_of_clients(federation):
    made = federation.calibrate(0.1, scope="client", temperature="none")
    held = federation.data.calibration
    scores = (1 - federation.predict(held.x).mean.double()).gather(1, held.y.unsqueeze(1))[:, 0]
    assert (held.sizes(6) >= 9).all()  # the number of rows at which a client needs no others
    for client, threshold in enumerate(made.client_thresholds):
        exact = conformal_threshold(scores[held.owner == client], 0.1)
        assert exact <= threshold <= exact + 1e-3
    new, _ = rows(50, 7)
    of_two = federation.predict(new, client=2)
    assert torch.equal(of_two.sets, 1 - of_two.mean.double() <= made.client_thresholds[2])
    owners = [2] * 25 + [-1] * 25
    both = federation.predict(new, client=owners).sets
    assert torch.equal(both[:25], of_two.sets[:25])
    assert torch.equal(both[25:], federation.predict(new).sets[25:])
    with pytest.raises(InputError, match="50 rows; got 3 clients"):
        federation.predict(new, client=[1, 2, 3]).sets
    with pytest.raises(InputError, match="clients 0 to 5"):
        federation.predict(new, client=6).sets
    with pytest.raises(InputError, match="unknown client 'somebody'"):
        federation.predict(new, client="somebody").sets


def test_a_client_with_few_rows_gets_help_from_all():
    """Rule by brute force: the pool counts as 9 rows, in which its scores have their shares."""
    federation = made(calibration=0.1)
    calibrated = federation.calibrate(0.1, scope="client", temperature="none")
    held = federation.data.calibration
    scores = (1 - federation.predict(held.x).mean.double()).gather(1, held.y.unsqueeze(1))[:, 0]
    few = [client for client, size in enumerate(held.sizes(6).tolist()) if size < 9]
    assert few
    edges = torch.arange(1, 1001, dtype=torch.double) / 1000
    for client in few:
        own = scores[held.owner == client]
        for edge in edges.tolist():
            share = float((scores <= edge).double().mean())
            if int((own <= edge).sum()) + 9 * share >= 0.9 * (len(own) + 9 + 1) - 1e-9:
                break
        assert calibrated.client_thresholds[client] == pytest.approx(edge, abs=1e-9)


def test_rows_that_fit_the_temperature_set_no_threshold(federation):
    both = federation.calibrate(0.2, temperature="mean")
    held, fit_rows, others = federation.data.calibration, 0, []
    outputs = federation.uncalibrated.outputs(held.x)
    for client in range(6):
        own = held.owner == client
        salt = rows_salt(held.x[own])
        one = CalibrationClient(outputs[:, :, own], held.y[own], False, federation.seed, salt)
        fit_rows += int(one._fits_temperature.sum())
        others.append(torch.nonzero(own).flatten()[~one._fits_temperature])
    rest = torch.cat(others)
    assert 0.2 < fit_rows / len(held) < 0.45
    p = federation.predict(held.x[rest]).mean.double()
    own = (1 - p).gather(1, held.y[rest].unsqueeze(1))
    exact = conformal_threshold(own, 0.2)
    assert exact <= both.thresholds[0] <= exact + 1e-3


@pytest.mark.parametrize("scope", ["mixture", "client", "pool"])
def test_clients_with_one_row_each_serve_temperature_and_threshold(scope):
    """Some fit the temperature, the others set the threshold, which needs no minimum per client."""
    x, y = rows(3_000, 1)
    data = fe.FederatedData.from_arrays(x, y, [10] * 300).with_calibration(0.1)
    assert data.calibration.sizes(300).tolist() == [1] * 300
    few = fe.Federation(net, data, fe.FedAvg(lr=0.5), modes=2)
    few.train(1)
    if scope == "pool":  # a client that is drawn at random may have any distribution
        with pytest.raises(InputError, match=r"needs \d+ .* there are \d+, of \d+ clients; the"):
            few.calibrate(0.1, scope=scope)
        return
    calibration = few.calibrate(0.1, scope=scope)
    assert (calibration.rows, calibration.clients) == (300, 300)
    new, labels = rows(2_000, 9)
    sets = few.predict(new).sets
    assert float(sets[torch.arange(2_000), labels].double().mean()) == pytest.approx(0.9, abs=0.06)


def spaced(outputs: torch.Tensor, target: torch.Tensor) -> Calibration:
    """The calibration of given outputs, [K, n, C], of clients with two rows each."""
    x, owner = torch.arange(len(target)).float().unsqueeze(1), torch.arange(len(target)) // 2
    clients = SimulatedClients(outputs.unsqueeze(1), ClientRows(x, target, owner), False, 0)
    facts = CalibrationFacts("classification", len(outputs), outputs.shape[-1], True, 1_000)
    wishes = CalibrationSettings(method="none", abstain=(), temperature="mean")
    return fit_calibration(clients, wishes, facts)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_a_temperature_is_used_if_it_pays_for_one_more_error(sharpness):
    """By brute force over 40 random calibrations, from 4 to 300 rows."""
    used = 0
    for case in range(40):
        count = (4, 12, 40, 300)[case % 4]
        logits = 2 * numbers(count, 3, word=case)
        target = (logits + 1.5 * numbers(count, 3, word=case + 1_000)).argmax(-1)
        logits = logits * sharpness

        def nll(t, logits=logits):
            return -(logits.double() / t).log_softmax(-1)

        def total(t, nll=nll, target=target):
            return float(nll(t).gather(1, target.unsqueeze(1)).sum())

        best = math.exp(
            minimize_scalar(
                lambda s, total=total: total(math.exp(s)), bounds=(-2, 3), options={"xatol": 1e-9}
            ).x
        )
        likeliest = torch.tensor(
            [
                max((c for c in range(3) if c != label), key=lambda c, row=row: float(row[c]))
                for row, label in zip(logits, target.tolist(), strict=True)
            ]
        )
        error = float((nll(best) - nll(1.0)).gather(1, likeliest.unsqueeze(1)).mean())
        expected = best if total(1.0) - total(best) > error else 1.0
        found = spaced(logits.unsqueeze(0), target)
        assert found.temperatures[0] == pytest.approx(expected, rel=1e-4)
        assert found.nll == pytest.approx((total(1.0) / count, total(expected) / count), rel=1e-4)
        used += expected != 1.0
    assert used > 20 or sharpness == 1.0


def test_rows_without_an_error_do_not_sharpen_the_probabilities():
    """A fit alone takes the smallest temperature: nothing says that the model is ever wrong."""
    target = torch.arange(30) % 3
    logits = 3 * nn.functional.one_hot(target, 3).float()
    assert spaced(logits.unsqueeze(0), target).temperatures == (1.0,)
    # With 600 such rows, one more error would be worth it.
    many = spaced(logits.repeat(20, 1).unsqueeze(0), target.repeat(20))
    assert many.temperatures[0] < 0.2


def test_bytes_of_a_calibration(federation):
    made = federation.calibrate(0.1, temperature="mean", abstain=[])
    clients = 6
    # 21 temperatures with their counts, four sums that say whether the best one is worth it
    sums, histogram = 21 * 3 * 8 + 4 + 4 * 8, 4 * 1000
    assert made.bytes_up == clients * (sums + histogram) and histogram <= 4096
    assert made.bytes_down - clients * federation.ensemble.prediction_bytes == clients * (24 + 8)
    by_class = federation.calibrate(0.2, temperature="none", scope="class", abstain=[])
    assert by_class.bytes_up == clients * 2 * 3 * 333 * 4  # two messages of at most 4 KB


def test_abstention_by_the_clients_rows(federation):
    federation.calibrate(temperature="none", abstain=["entropy", "max_probability"])
    held, (new, _) = federation.data.calibration, rows(200, 9)
    prediction = federation.predict(new)
    known = federation.predict(held.x), held.y
    for score, bin_width in (("entropy", math.log(3) / 500), ("max_probability", 1 / 500)):
        for wish in ({"coverage": 0.8}, {"risk": 0.3}):
            exact = prediction.abstain(**wish, score=score, calibration=known).threshold
            ours = prediction.abstain(**wish, score=score).threshold
            assert exact <= ours <= exact + 1.01 * bin_width
    with pytest.raises(InputError, match=r"has entropy, max_probability to abstain by.*abstain=\["):
        prediction.abstain(coverage=0.5, score="mutual_information")


def test_training_ends_a_calibration(federation):
    federation = made()
    calibrated = federation.calibrate()
    assert federation.calibration is calibrated
    new, _ = rows(5, 3)
    assert federation.predict(new).sets.shape == (5, 3)
    federation.train(1)
    assert federation.calibration is None
    with pytest.raises(InputError, match="no prediction sets without calibration"):
        federation.predict(new).sets


def test_records_keep_everything(federation):
    for settings in ({"scope": "client"}, {"scope": "class", "alpha": 0.2}, {"method": "none"}):
        made = federation.calibrate(**settings)
        again = Calibration.from_record(made.to_record())
        assert again.to_record() == made.to_record() and again.settings == made.settings
        assert repr(again) == repr(made)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", 0),
        ("rows", "many"),
        ("temperatures", [0.0]),
        ("temperatures", [1.0, 2.0]),
        ("temperatures", ["hot"]),
        ("thresholds", [0.1, 0.2]),
        ("thresholds", [math.nan]),
        ("client_names", ["a"]),
        ("client_thresholds", None),
        ("place", "nowhere"),
        ("abstention", {"entropy": [[1, 2]]}),
        ("abstention", {"entropy": [[10**9], [1]]}),
        ("abstention", {"entropy": [[-1], [1]]}),
        ("settings", {"alpha": 2.0}),
        ("settings", None),
        ("unknown", 1),
    ],
)
def test_records_that_are_none(federation, key, value):
    record = federation.calibrate(temperature="mean").to_record()
    with pytest.raises(ValueError, match=r"."):
        Calibration.from_record({**record, key: value})


class Quantiles(nn.Module):
    """Two outputs in ascending order: quantiles of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.width = nn.Linear(1, 1), nn.Parameter(torch.tensor([-1.0]))

    def forward(self, x):
        middle, half = self.middle(x), nn.functional.softplus(self.width)
        return torch.cat([middle - half, middle + half], -1)


def pinball(outputs, targets):
    errors = targets.reshape(-1, 1) - outputs
    levels = torch.tensor([0.1, 0.9], dtype=outputs.dtype)
    return torch.maximum(levels * errors, (levels - 1) * errors).mean(-1)


@pytest.mark.filterwarnings("ignore:The model cannot be batched layer by layer")
@pytest.mark.parametrize("method", ["absolute", "cqr"])
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_intervals(method, outlier):
    x = numbers(400, 1, word=1)
    y = 2 * x + numbers(400, 1, word=2)
    y[3] *= outlier
    data = fe.FederatedData.from_arrays(x, y, [100] * 4).with_calibration(0.5)
    federation = fe.Federation(
        Quantiles if method == "cqr" else (lambda: nn.Linear(1, 1)),
        data,
        fe.FedAvg(lr=0.05),
        modes=2,
        loss=pinball if method == "cqr" else "mse",
    )
    federation.train(20)
    calibrated = federation.calibrate(0.2, method=method, scope="pool")
    held = data.calibration
    outputs = federation.predict(held.x).mean.double()
    target = held.y[:, 0].double()
    scores = torch.maximum(outputs[:, 0] - target, target - outputs[:, -1])
    exact = float(scores.sort().values[conformal_rank(len(target), 0.2, 4) - 1])
    assert exact <= calibrated.thresholds[0] <= exact + 1.1e-3 * abs(exact)
    new = numbers(1000, 1, word=5)
    truth = 2 * new + numbers(1000, 1, word=6)
    interval = federation.predict(new).interval
    assert interval.shape == (1000, 2)
    inside = (interval[:, :1] <= truth) & (truth <= interval[:, 1:])
    assert 0.74 < float(inside.double().mean()) < 0.9
    with pytest.raises(InputError, match="is regression"):
        federation.predict(new).sets
    with pytest.raises(InputError, match="scales class probabilities, and this is regression"):
        federation.calibrate(temperature="mean")
    own = federation.calibrate(0.2, method=method, scope="client").client_thresholds
    for client, threshold in enumerate(own):
        exact = conformal_threshold(scores[held.owner == client], 0.2)
        assert exact <= threshold <= exact + 2 * float(scores.abs().max()) * 2 / 1000


def test_other_methods_than_the_tasks(federation):
    with pytest.raises(
        InputError, match="method 'absolute' is not for classification; use one of lac"
    ):
        federation.calibrate(method="absolute")
    federation.calibrate()
    prediction = federation.predict(rows(5, 1)[0])
    with pytest.raises(InputError, match=r"'interval' is for regression"):
        prediction.interval


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan, 1, None, "0.1"])
def test_alpha_outside_of_0_and_1(federation, alpha):
    with pytest.raises(InputError, match="alpha, the share of targets that may be missed"):
        federation.calibrate(alpha)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"method": "best"}, "method to be one of auto, none, lac, aps, raps, absolute, cqr"),
        ({"temperature": "hot"}, "temperature to be one of auto, none, mean, member"),
        ({"scope": "planet"}, "scope to be one of mixture, pool, client, class"),
        ({"randomized": 1}, "randomized to be true or false"),
        ({"penalty": -1}, "penalty to be a finite number >= 0"),
        ({"free_classes": 0.5}, "free_classes to be an integer >= 0"),
        ({"abstain": "entropy"}, "abstain to be a list of scores"),
        ({"abstain": ["energy"]}, "abstain to be one of max_probability, entropy"),
        ({"levels": 3}, "unexpected keyword argument 'levels'"),
    ],
)
def test_settings_that_are_none(federation, settings, text):
    with pytest.raises(InputError, match=text):
        federation.calibrate(**settings)


def test_without_calibration_rows():
    federation = made(calibration=0)
    with pytest.raises(InputError, match="rows that were not trained on, and these data have none"):
        federation.calibrate()


def test_too_few_rows(federation):
    with pytest.raises(
        InputError,
        match=r"needs 999 calibration rows .*there are 159, of 6 clients; the other 81 of the 240",
    ):
        federation.calibrate(0.001)
    with pytest.raises(
        InputError, match=r"needs 594 .*scope='pool'.*or use scope='mixture', which needs fewer"
    ):
        federation.calibrate(0.01, scope="pool")


def test_a_class_that_never_occurs():
    x, y = rows(600, 1)
    names = ("cat", "dog", "fox", "owl")
    data = fe.FederatedData.from_arrays(x, y, [100] * 6, class_names=names).with_calibration(0.4)
    four = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    federation = fe.Federation(four, data, fe.FedAvg(lr=0.5), modes=2)
    federation.train(2)
    with pytest.raises(
        InputError, match=r"9 calibration rows of each class .* class owl never occurs"
    ):
        federation.calibrate(scope="class")
    assert federation.calibrate().has_sets


def test_sequences_have_temperatures_and_no_sets():
    x, y = torch.randint(5, (60, 7)), torch.randint(5, (60, 7))
    data = fe.FederatedData.from_arrays(x, y, [30, 30]).with_calibration(0.5)
    tokens = lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))  # noqa: E731
    federation = fe.Federation(tokens, data, fe.FedAvg(lr=0.5), modes=2)
    federation.train(2)
    made = federation.calibrate(method="none")
    assert made.temperatures and sum(map(sum, made.abstention["entropy"])) <= 30 * 7
    with pytest.raises(InputError, match="one label per row for prediction sets"):
        federation.calibrate()


def test_thresholds_of_clients_lift_the_worst_decile():
    """Mean coverage per client over random splits: the marginal guarantee of each client."""
    clients = 20
    data = partition(load("digits"), "dirichlet", clients=clients, seed=0, alpha=0.3)
    data = data.with_calibration(0.5)
    federation = fe.Federation("mlp", data, fe.FedAvg(lr=0.1), modes=3, clients_per_round=10)
    federation.train(30)
    held, alpha = data.calibration, 0.1
    outputs = federation.uncalibrated.outputs(held.x)
    score = (1 - federation.predict(held.x).mean.double()).gather(1, held.y.unsqueeze(1))[:, 0]
    rng = torch.Generator().manual_seed(0)
    hits = {scope: torch.zeros(clients) for scope in ("mixture", "client")}
    tested = torch.zeros(clients)
    for _ in range(40):
        chosen = torch.rand(len(held), generator=rng) < 0.5
        part = fe.data.ClientRows(held.x[chosen], held.y[chosen], held.owner[chosen])
        new, owner = score[~chosen], held.owner[~chosen]
        tested += torch.bincount(owner, minlength=clients)
        simulated = SimulatedClients(outputs[:, :, chosen], part, False, 0)
        facts = calibration_facts(federation.ensemble, outputs, held.y, clients, None)
        for scope in hits:
            settings = CalibrationSettings(alpha=alpha, scope=scope, temperature="none", abstain=())
            made = fit_calibration(simulated, settings, facts)
            limit = torch.tensor(made.client_thresholds or made.thresholds * clients)
            hits[scope] += torch.bincount(owner[new <= limit[owner]], minlength=clients)
    worst = {
        scope: float((hit / tested).sort().values[: clients // 10].mean())
        for scope, hit in hits.items()
    }
    assert worst["mixture"] < 0.8 and worst["client"] >= 1 - alpha - 0.02
