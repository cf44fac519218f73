"""Searches: proposals, training in batches, validation data, diverged trials, and resuming."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedensemble.config.build import build_data
from fedensemble.config.search_space import Choices, Range, parse_space
from fedensemble.config.toml import read_toml
from fedensemble.data import load
from fedensemble.errors import DivergedError, InputError, StoreError
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.run_folder import RunFolder, find_runs
from fedensemble.experiment.studies.compare import run_folder
from fedensemble.experiment.studies.propose import RANDOM, propose
from fedensemble.experiment.studies.tune import RECORD, make_search, read_trials, tune

BASE = {
    "name": "small",
    "rounds": 3,
    "data": {"source": "digits", "clients": 12},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "lr": 0.1},
    "ensemble": {"modes": 2, "clients_per_round": 4},
    "training": {"batch_size": 8},
}
LR = Range("algorithm.lr", 0.01, 1.0, log=True)


def silent(index, settings, seed):
    return RunCallbacks()


def train(search, root, trials, batch, callbacks=silent):
    return tune(search, root, trials, batch, callbacks, lambda: None)


# Proposals


def test_proposals_are_new_inside_the_spaces_and_repeatable():
    spaces = [LR, Range("k", 1, 4, integer=True), Choices("name", ("'a'", "b|c"))]
    results = []
    for seed in range(4):
        proposed = propose(spaces, results, 8, True, seed)
        assert proposed == propose(spaces, results, 8, True, seed)
        for settings in proposed:
            assert 0.01 <= float(settings["algorithm.lr"]) <= 1
            assert settings["k"] in "1234" and settings["name"] in ("'a'", "b|c")
        results += [(settings, float(n)) for n, settings in enumerate(proposed)]
    assert len({tuple(settings.values()) for settings, _ in results}) == 32


def test_a_finite_space_is_searched_completely_and_then_has_no_more():
    spaces = [Range("k", 1, 3, integer=True), Choices("n", ("x", "y"))]
    first = propose(spaces, [], 4, True, 0)
    rest = propose(spaces, [(settings, 0.0) for settings in first], 9, True, 1)
    assert len(first) == 4 and len(rest) == 2
    assert {(s["k"], s["n"]) for s in first + rest} == {(k, n) for k in "123" for n in "xy"}


@pytest.mark.parametrize("maximize", [True, False])
def test_proposals_approach_the_best_value_and_avoid_what_diverges(maximize):
    """The objective is best at 0.1; above 0.3 all diverges. Random trials have a mean of 0.5."""

    def objective(settings):
        lr = float(settings["algorithm.lr"])
        value = abs(math.log10(lr) + 1)
        return None if lr > 0.3 else -value if maximize else value

    results = []
    while len(results) < 60:
        proposed = propose([LR], results, 6, maximize, len(results))
        results += [(settings, objective(settings)) for settings in proposed]
    distances = [abs(math.log10(float(s["algorithm.lr"])) + 1) for s, _ in results]
    assert np.mean(distances[30:]) < 0.6 * np.mean(distances[:RANDOM])
    assert sum(value is None for _, value in results[30:]) <= 6


# Searches


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search of eight trials in batches of four; every trial has two seeds."""
    root = tmp_path_factory.mktemp("runs")
    search = make_search(BASE, [LR], "nll", seeds=[0, 1])
    return search, root, train(search, root, 8, 4)


def test_each_trial_has_the_result_of_its_run_trained_alone(searched, tmp_path):
    search, _, trials = searched
    assert len(trials) == 8
    for trial in (trials[0], trials[6]):
        for seed, value in zip(search.seeds, trial.values, strict=True):
            summary = run(search.config(trial.settings, seed), tmp_path / f"{seed}{value}")
            assert summary["test"]["nll"] == pytest.approx(value, rel=1e-4)


def test_trials_of_a_batch_train_as_one_program(searched):
    _, root, _ = searched
    runs = find_runs(root)
    assert len(runs) == 16
    assert all(store.summary()["trained_together"] == 8 for store in runs)


def test_trials_do_not_see_the_test_set_but_the_best_config_does(searched):
    search, _, trials = searched
    digits = load("digits")
    test_rows = {row.tobytes() for row in np.asarray(digits.x_test, np.float32)}
    training_rows = {row.tobytes() for row in np.asarray(digits.x, np.float32)}
    validation = build_data(search.config(trials[0].settings, 0)).x_test.numpy()
    assert len(validation) == pytest.approx(0.1 * len(digits.x), rel=0.05)
    rows = {row.tobytes() for row in validation.astype(np.float32)}
    assert rows <= training_rows and not rows <= test_rows
    best = search.best_config(trials)
    assert best.name == "small" and best.data.get("validation") is None
    assert len(build_data(best).x_test) == len(digits.x_test)


def test_the_best_trial_has_the_lowest_mean_nll(searched):
    search, _, trials = searched
    means = [np.mean(trial.values) for trial in trials]
    assert search.best(trials) is trials[int(np.argmin(means))]
    assert [trial.value for trial in search.ranked(trials)] == sorted(means)
    lr = search.best_config(trials).algorithm["lr"]
    assert lr == float(trials[int(np.argmin(means))].settings["algorithm.lr"])


def test_a_finished_search_is_not_trained_again_and_can_be_extended(searched):
    search, root, trials = searched
    counted = []

    def refuse(index, settings, seed):
        assert index >= 8, "this trial is finished"
        return RunCallbacks()

    again = tune(search, root, 8, 4, refuse, lambda: counted.append(1))
    assert again == trials and len(counted) == 16
    longer = train(search, root, 9, 4, refuse)
    assert longer[:8] == trials and len(longer) == 9


def test_a_search_that_was_killed_continues_with_the_same_trials(searched, tmp_path):
    search, _, trials = searched

    def killed(index, settings, seed):
        def on_round_end(report, metrics):
            if index == 5 and report.round == 2:
                raise KeyboardInterrupt

        return RunCallbacks(on_round_end=on_round_end)

    with pytest.raises(KeyboardInterrupt):
        train(search, tmp_path, 8, 4, killed)
    stopped = read_trials(search.folder(tmp_path) / RECORD)
    assert [trial.ended for trial in stopped] == [True] * 4 + [False] * 4
    assert [trial.settings for trial in stopped] == [trial.settings for trial in trials]
    continued = train(search, tmp_path, 8, 4)
    for trial, expected in zip(continued, trials, strict=True):
        assert trial.settings == expected.settings
        assert trial.values == pytest.approx(expected.values, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    ["config.toml", "summary.json", "checksums.json", "modes.safetensors", "metrics.jsonl"],
)
@pytest.mark.parametrize("length", [None, 0, 40])
def test_a_trial_whose_files_a_power_cut_left_incomplete_is_trained_again(
    searched, tmp_path, name, length
):
    search, _, _ = searched
    search = replace(search, seeds=(0,))
    trials = train(search, tmp_path, 2, 2)
    file, broken = search.folder(tmp_path) / RECORD, trials[1]
    # The record says only at the end that a trial is done.
    record = json.loads(file.read_text())
    record["trials"][1]["values"] = []
    file.write_text(json.dumps(record))
    path = run_folder(search.config(broken.settings, 0), tmp_path) / name
    if length is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:length])
    again = train(search, tmp_path, 2, 2)
    assert again[0] == trials[0] and again[1].settings == broken.settings
    assert again[1].values == pytest.approx(broken.values, rel=1e-4)
    assert path.stat().st_size > 40


def test_trials_write_no_files_that_only_reports_of_runs_need(searched):
    _, root, _ = searched
    for store in find_runs(root):
        names = {path.name for path in store.path.iterdir()}
        assert {"config.toml", "summary.json", "modes.safetensors", "metrics.jsonl"} <= names
        assert not names & {"predictions.json", "clients.json", "checkpoint"}
        assert store.changes() == ""


def test_trials_are_tested_after_the_last_round_only(searched, tmp_path):
    search, root, trials = searched
    for store in find_runs(root):
        assert ["test" in record for record in store.metrics()] == [False, False, True]
    # Other runs are tested as the config says.
    config = search.config(trials[0].settings, 0)
    config = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"every": 1})}
    )
    run(config, tmp_path)
    assert all("test" in record for record in RunFolder(tmp_path).metrics())


def test_the_records_of_a_trial_are_complete_on_disk_after_it(tmp_path):
    search = make_search({**BASE, "rounds": 30}, [Choices("algorithm.lr", ("1e9", "0.1", "0.2"))])
    trials = train(search, tmp_path, 3, 3)
    for trial in trials:
        folder = run_folder(search.config(trial.settings, 0), tmp_path)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rounds = [json.loads(line)["round"] for line in lines]
        assert rounds == list(range(1, len(rounds) + 1))
        assert (len(rounds) == 30) == (not trial.diverged)
        assert not trial.diverged or len(rounds) >= 5


def test_trials_that_cannot_share_a_program_are_trained_in_groups(tmp_path):
    spaces = [
        LR,
        Choices("model.hidden", ("[8]", "[4]")),
        Choices("algorithm", ("fedavg", "scaffold")),
    ]
    trials = train(make_search(BASE, spaces), tmp_path, 10, 10)
    assert all(trial.values for trial in trials)
    groups = {}
    for trial in trials:
        key = (trial.settings["model.hidden"], trial.settings["algorithm"])
        groups[key] = groups.get(key, 0) + 1
    sizes = sorted(store.summary()["trained_together"] for store in find_runs(tmp_path))
    assert sizes == sorted(size for size in groups.values() for _ in range(size))


def test_a_diverged_trial_is_stopped_and_worse_than_all_others(tmp_path):
    search = make_search({**BASE, "rounds": 12}, [Choices("algorithm.lr", ("1e9", "0.1"))])
    trials = train(search, tmp_path, 5, 4)
    assert len(trials) == 2
    bad, good = sorted(trials, key=lambda trial: not trial.diverged)
    assert bad.settings == {"algorithm.lr": "1e9"} and not bad.values and "loss" in bad.diverged
    assert search.best(trials) == good and search.ranked(trials) == [good]
    folder = run_folder(search.config(bad.settings, 0), tmp_path)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) < 12
    with pytest.raises(DivergedError, match="All trials have diverged"):
        search.best([bad])


def test_regression_is_searched_by_its_error(tmp_path):
    values = {
        **BASE,
        "data": {"source": "sine", "clients": 12},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"loss": "mse"},
    }
    search = make_search(values, [LR])
    trials = train(search, tmp_path, 2, 2)
    assert search.metric == "mse" and not search.maximize
    assert search.best(trials).value == min(trial.value for trial in trials)


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([], {}, "nothing to search"),
        (["seed=0..3"], {}, "--seeds"),
        (["algorithm.lr=log:0.1..1"], {"metric": "entropy"}, "unknown objective 'entropy'"),
        (["algorithm.lr=log:0.1..1"], {"metric": "mse"}, "unknown objective 'mse'"),
        (["algorithm.lr=log:0.1..1"], {"seeds": [1, 1]}, "distinct"),
        (["algorithm.lrr=log:0.1..1"], {}, "lrr"),
        (["ensemble.modes=0..3"], {}, "ensemble.modes"),
        (["algorithm.lr=-1.0..1"], {}, "lr"),
        (["algorithm=fedavg|fedavgg"], {}, "did you mean 'fedavg'"),
        (["training.batch_size=0.5..8"], {}, "batch_size"),
    ],
)
def test_mistakes_are_found_before_training(texts, changes, message):
    with pytest.raises(InputError, match=message):
        make_search(BASE, [parse_space(text) for text in texts], **changes)


def test_a_mistake_of_the_config_is_reported_once():
    with pytest.raises(InputError) as raised:
        make_search({**BASE, "rounds": 0}, [LR, Range("training.batch_size", 1, 8, integer=True)])
    assert str(raised.value).count("rounds") == 1 and "1 problem" in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"trials": [3]}',
        '{"trials": [{"settings": {"a": 1}, "values": [], "diverged": ""}]}',
    ],
)
def test_a_damaged_record_is_named(content, tmp_path):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(StoreError, match=RECORD):
        read_trials(tmp_path / RECORD)


def test_the_record_is_plain_json(searched):
    search, root, trials = searched
    record = json.loads((search.folder(root) / RECORD).read_text())["trials"]
    assert [each["settings"] for each in record][:8] == [trial.settings for trial in trials]
    assert read_trials(search.folder(root).parent / "none.json") == []


def test_read_toml_of_the_best_config_gives_the_best_config(searched, tmp_path):
    search, _, trials = searched
    (tmp_path / "best.toml").write_text(search.best_config(trials).toml(empty=False))
    assert read_toml(tmp_path / "best.toml")["algorithm"]["lr"] == float(
        search.best(trials).settings["algorithm.lr"]
    )
