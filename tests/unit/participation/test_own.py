"""A user's own participation, and reports of simulated time."""

from dataclasses import dataclass

import pytest

from fedensemble import FedAvg, Federation, InputError, Participation, Plan
from fedensemble.core.participation import participations
from fedensemble.core.types import Outcome
from fedensemble.report.figures.plots import run_figure
from fedensemble.report.tables.result_table import run_table, time_table
from fedensemble.report.time_to_accuracy import common_target, reached, seconds_to
from fedensemble.testing.toy_problems import classification, small_federation, small_model, train


@dataclass(frozen=True, kw_only=True)
class EvenClients(Participation):
    """Only clients with an even index reply."""

    def outcome(self, state, schedule, planned, round, costs):
        plan = schedule.plan(planned, round)
        answers = plan.client % 2 == 0
        return Outcome(Plan(plan.client[answers], plan.mode[answers]), state)


def test_a_users_own_participation(tmp_path):
    federation = small_federation(FedAvg(), "vector", 2, 2, participation=EvenClients())
    for report in federation.rounds(5):
        assert report.plan.client.tolist() and all(
            client % 2 == 0 for client in report.plan.client.tolist()
        )
    federation.save(tmp_path)
    with pytest.raises(InputError, match=r"The participation saved in .* pass participation="):
        Federation.load(tmp_path, model=small_model, data=classification())
    loaded = Federation.load(
        tmp_path, model=small_model, data=classification(), participation=EvenClients()
    )
    assert train(loaded, 1).round == 6
    participations.register("even")(EvenClients)
    try:
        federation.save(tmp_path)
        assert (
            Federation.load(tmp_path, model=small_model, data=classification()).participation
            == EvenClients()
        )
    finally:
        del participations._items["even"]


def record(round, clock, accuracy=None, loss=1.0):
    test = {} if accuracy is None else {"test": {"accuracy": accuracy}}
    return {"round": round, "loss": loss, "clock": clock, **test}


RUN = [
    record(1, 1800.0),
    record(2, 3600.0, 0.55),
    record(3, 4200.0, loss=None),
    record(4, 9000.0, 0.84),
]


def test_time_to_accuracy():
    assert (
        reached(RUN, 0.5)["round"] == 2
        and reached(RUN, 0.8)["round"] == 4
        and reached(RUN, 0.9) is None
    )
    assert time_table(RUN).rows == (("50 %", "2", "1.00"), ("80 %", "4", "2.50"))
    assert time_table([{"round": 1, "loss": 1.0, "test": {"accuracy": 0.9}}]) is None  # no clock
    assert time_table([record(1, 5.0, 0.01)]) is None


def test_runs_are_compared_at_what_all_of_them_reach():
    worse = [record(1, 600.0, 0.3), record(2, 1200.0, 0.519)]
    assert common_target([RUN, worse]) == 0.51
    assert seconds_to([RUN, worse], 0.51) == [3600.0, 1200.0]
    assert common_target([RUN, [{"round": 1, "loss": 1.0, "test": {"accuracy": 0.9}}]]) is None


@pytest.mark.parametrize(("accuracy", "rise"), [(0.29, 29), (0.57, 57), (0.58, 58), (1.0, 100)])
def test_a_target_is_not_lost_to_rounding(accuracy, rise):
    runs = [[record(1, 5.0, accuracy)]]
    assert common_target(runs) == rise / 100 and seconds_to(runs, rise / 100) == [5.0]


def test_tables_and_curves_of_rounds_without_replies():
    summary = {
        "name": "x",
        "modes": 2,
        "rounds": 4,
        "bytes_up": 0,
        "bytes_down": 0,
        "clock": 9000.0,
        "unanswered": 1,
    }
    rows = dict(run_table(summary).rows)
    assert rows["simulated time, h"] == "2.50" and rows["rounds without a reply"] == "1"
    left, _, right = run_figure(RUN, "title").axes
    assert list(left.lines[0].get_xdata()) == [1, 2, 4]  # without the round that had no reply
    assert (
        list(right.lines[0].get_xdata()) == [1.0, 2.5] and right.get_xlabel() == "simulated hours"
    )
    assert len(run_figure([record(1, 600.0, loss=None)], "title").axes) == 1
