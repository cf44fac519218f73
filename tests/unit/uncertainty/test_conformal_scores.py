"""Conformity scores, sets and intervals against MAPIE and brute force; thresholds by histograms."""

import math
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, RAPSConformityScore
from mapie.conformity_scores.bounds import AbsoluteConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin

from fedensemble import InputError
from fedensemble.uncertainty.conformal_scores import (
    class_scores,
    interval_scores,
    interval_within,
    largest_class_score,
    row_uniform,
)
from fedensemble.uncertainty.conformal_threshold import (
    BINS,
    bin_edges,
    conformal_rank,
    conformal_threshold,
    count_scores,
    find_bins,
    rows_needed,
)


class Probabilities(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose inputs are its probabilities."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes

    def fit(self, x, y=None):
        self.classes_ = np.arange(self.classes)
        return self

    def predict_proba(self, x):
        return np.asarray(x)

    def predict(self, x):
        return np.asarray(x).argmax(-1)


def cases():
    """200 random (probabilities, labels): ties, one class only, rows without doubt.

    Three classes or more: with two, MAPIE's APS raises an IndexError.
    """
    rng = np.random.default_rng(0)
    for case in range(200):
        rows, classes = int(rng.integers(20, 60)), int(rng.integers(3, 8))
        p = rng.dirichlet(np.full(classes, rng.choice([0.1, 1.0, 10.0])), rows)
        y = np.array([rng.choice(classes, p=row) for row in p])
        if case % 4 == 1:
            p = np.round(p, 1) + 0.05
            p /= p.sum(1, keepdims=True)
        if case % 4 == 2:
            y[:] = 0
        yield case, p, y


@pytest.mark.filterwarnings("ignore:WARNING. your conformalization dataset has less labels")
def test_lac_sets_are_mapies():
    for _, p, y in cases():
        half = len(y) // 2
        model = Probabilities(p.shape[1]).fit(None)
        mapie = SplitConformalClassifier(model, confidence_level=0.8, conformity_score="lac")
        expected = mapie.conformalize(p[:half], y[:half]).predict_set(p[half:])[1][:, :, 0]
        scores = class_scores(torch.tensor(p), "lac")
        own = scores[torch.arange(half), torch.tensor(y[:half])]
        threshold = conformal_threshold(own, 0.2)
        # MAPIE's comparison has this tolerance.
        assert ((scores[half:] <= threshold + 1e-8).numpy() == expected).all()


@pytest.mark.parametrize("randomized", [False, True])
def test_aps_and_raps_scores_are_mapies(randomized):
    for case, p, y in cases():
        if case % 4 == 1:
            continue  # MAPIE orders equal probabilities by an unstable sort
        probabilities, target = torch.tensor(p), torch.tensor(y)
        u = row_uniform(probabilities).numpy() if randomized else np.zeros(len(y))
        mapie = APSConformityScore()
        mapie.classes, mapie.random_state = np.arange(p.shape[1]), None
        draw = SimpleNamespace(uniform=lambda size, u=u: u)
        with patch("mapie.conformity_scores.sets.aps.check_random_state", lambda _, d=draw: d):
            expected = mapie.get_conformity_scores(y, p, y_enc=y)
        ours = class_scores(probabilities, "aps", randomized=randomized)
        own = ours.gather(1, target.unsqueeze(1))
        np.testing.assert_allclose(own, expected, atol=1e-12)
        regular = RAPSConformityScore._regularize_conformity_score(
            np.array([2]), 0.05, expected, mapie.cutoff
        )
        ours = class_scores(
            probabilities, "raps", randomized=randomized, penalty=0.05, free_classes=2
        )
        own = ours.gather(1, target.unsqueeze(1))
        np.testing.assert_allclose(own, regular[:, :, 0], atol=1e-12)


def test_randomized_aps_sets_are_mapies():
    for case, p, _ in cases():
        if case % 4 == 1:
            continue
        u, threshold = row_uniform(torch.tensor(p)).numpy().reshape(-1, 1), 0.8
        mapie = APSConformityScore()
        mapie.classes, mapie.random_state = np.arange(p.shape[1]), None
        mapie.quantiles_ = np.array([threshold])
        draw = SimpleNamespace(uniform=lambda size, u=u: u)
        with patch("mapie.conformity_scores.sets.aps.check_random_state", lambda _, d=draw: d):
            expected = mapie.get_prediction_sets(
                p[:, :, None],
                np.array([]),
                np.array([0.2]),
                "prefit",
                include_last_label="randomized",
            )[:, :, 0]
        sets = (class_scores(torch.tensor(p), "aps") <= threshold).numpy()
        clear = p.min(1) > 1e-6  # MAPIE treats probabilities near 0 separately
        assert (sets == expected)[clear].all()


def test_scores_by_brute_force_with_ties():
    for _, p, _ in cases():
        u = row_uniform(torch.tensor(p)).numpy()
        aps = class_scores(torch.tensor(p), "aps").numpy()
        raps = class_scores(torch.tensor(p), "raps", penalty=0.1, free_classes=1).numpy()
        for row in range(0, len(p), 7):
            order = sorted(range(p.shape[1]), key=lambda c: (-p[row, c], c))
            total = 0.0
            for rank, c in enumerate(order):
                total = min(total + p[row, c], 1.0)
                value = max(total - u[row] * p[row, c], 0)
                assert aps[row, c] == pytest.approx(value, abs=1e-12)
                assert raps[row, c] == pytest.approx(value + 0.1 * rank, abs=1e-12)


def test_draws_of_rows_are_uniform_and_belong_to_the_row():
    p = torch.softmax(4 * torch.randn(4000, 5, generator=torch.Generator().manual_seed(0)), -1)
    u = row_uniform(p).sort().values
    assert float((u - torch.linspace(0, 1, 4000)).abs().max()) < 0.03  # Kolmogorov-Smirnov
    assert torch.equal(row_uniform(p)[7:9], row_uniform(p[7:9]))
    # Sure rows differ in their small probabilities, and so do their draws.
    sure = torch.softmax(torch.tensor([[30.0, 0, 1], [30.0, 1, 0], [31.0, 0, 1]]), -1)
    assert len(set(row_uniform(sure).tolist())) == 3


def test_intervals_are_mapies_and_contain_the_scores():
    rng = torch.Generator().manual_seed(0)
    mean, y = torch.randn(50, 1, generator=rng), torch.randn(50, generator=rng)
    scores = interval_scores(mean, y)
    expected = AbsoluteConformityScore().get_signed_conformity_scores(
        y.double().numpy(), mean[:, 0].double().numpy()
    )
    np.testing.assert_allclose(scores, np.abs(expected), atol=1e-12)
    quantiles = torch.randn(50, 3, generator=rng).sort(-1).values
    for outputs, method in ((mean, "absolute"), (quantiles, "cqr")):
        scores = interval_scores(outputs, y, method)
        for threshold in (scores.median(), scores.max()):
            lower, upper = interval_within(outputs, threshold, method).unbind(-1)
            inside = (lower <= y + 1e-12) & (y <= upper + 1e-12)
            assert torch.equal(inside, scores <= threshold)
    crossed = interval_within(quantiles, torch.tensor(-100.0), "cqr")
    assert torch.equal(crossed[:, 0], crossed[:, 1])


def test_largest_scores():
    p = torch.eye(4)[:1]
    for method, kwargs in (("lac", {}), ("aps", {}), ("raps", {"penalty": 0.2, "free_classes": 2})):
        scores = class_scores(p, method, randomized=False, **({} if method != "raps" else kwargs))
        assert float(scores.max()) == largest_class_score(method, 4, **kwargs)


def histogram_threshold(scores, clients, rank):
    """The threshold from the sum of the clients' histograms."""
    edges = bin_edges(torch.zeros(1), torch.ones(1), BINS)
    zero = torch.zeros(len(scores), dtype=torch.int64)
    counts = sum(
        count_scores(scores[clients == c], zero[clients == c], edges)
        for c in clients.unique().tolist()
    )
    return float(edges[0, find_bins(counts, torch.tensor([rank]))])


def test_thresholds_from_histograms_are_at_most_a_bin_too_high_and_never_too_low():
    rng = torch.Generator().manual_seed(0)
    for case in range(200):
        rows = 5 + case
        scores = torch.rand(rows, generator=rng, dtype=torch.double)
        if case % 3 == 1:  # on edges, with ties
            scores = (scores * 1000).round() / 1000
        if case % 3 == 2:
            scores = (scores * 4).round() / 4
        clients = torch.randint(4, (rows,), generator=rng)
        rank = int(torch.randint(1, rows + 1, (1,), generator=rng))
        exact = float(scores.kthvalue(rank).values)
        threshold = histogram_threshold(scores, clients, rank)
        assert exact <= threshold <= exact + 1e-3 + 1e-15
    assert BINS * 4 <= 4096  # bytes of a message


def test_scores_above_the_last_edge_are_left_out():
    edges = bin_edges(torch.tensor([0.2]), torch.tensor([0.4]), 2)
    scores, group = torch.tensor([0.1, 0.2, 0.3, 0.35, 0.41]), torch.zeros(5, dtype=torch.int64)
    assert count_scores(scores.double(), group, edges).tolist() == [[2, 2]]
    with pytest.raises(InputError, match="fewer scores"):
        find_bins(torch.tensor([[1, 1]]), torch.tensor([3]))


def coverages(rows, clients, alpha, *, corrected, repeats=1000):
    """Coverage of new rows over random calibration sets of clients with scores of their own.

    Each client's scores have another distribution; a new row belongs to a client that is drawn in
    proportion to its calibration rows plus one.
    """
    rng = np.random.default_rng(rows + clients)
    sizes = rng.multinomial(rows - clients, np.full(clients, 1 / clients)) + 1
    owner = np.repeat(np.arange(clients), sizes)
    power = np.linspace(0.5, 2.0, clients)
    scores = rng.random((repeats, rows)) ** power[owner]
    rank = conformal_rank(rows, alpha, clients) if corrected else math.ceil((1 - alpha) * rows)
    threshold = np.sort(scores, 1)[:, rank - 1]
    of_client = threshold[:, None] ** (1 / power)  # P(score <= threshold), exactly
    return (of_client * (sizes + 1)).sum(1) / (rows + clients)


@pytest.mark.parametrize("alpha", [0.1, 0.2])
@pytest.mark.parametrize(
    ("rows", "clients"), [(20, 1), (20, 2), (50, 1), (50, 5), (100, 1), (100, 10)]
)
def test_coverage_over_random_splits(rows, clients, alpha):
    covered = coverages(rows, clients, alpha, corrected=True)
    error = 2 * covered.std() / math.sqrt(len(covered))
    assert 1 - alpha - error <= covered.mean() <= 1 - alpha + clients / (rows + clients) + error
    naive = coverages(rows, clients, alpha, corrected=False)
    assert naive.mean() < 1 - alpha - 2 * naive.std() / math.sqrt(len(naive))


def test_ranks_and_rows():
    for alpha in (0.01, 0.05, 0.1, 0.25, 0.5):
        for clients in (1, 3, 20):
            needed = rows_needed(alpha, clients)
            assert conformal_rank(needed, alpha, clients) <= needed
            if needed > 1:
                assert conformal_rank(needed - 1, alpha, clients) > needed - 1
    assert conformal_threshold(torch.rand(8), 0.1) == math.inf
    with pytest.raises(InputError, match="alpha must be above 0"):
        conformal_threshold(torch.rand(8), 1.0)
