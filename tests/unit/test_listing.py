"""What `fedensemble ls algorithms` says of methods is what they do."""

from dataclasses import dataclass

import pytest
import torch

from fedensemble import FedAvg
from fedensemble.core.algorithm import algorithms
from fedensemble.report.listing import listing, listing_table
from fedensemble.report.methods import describe_method


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return {record["name"]: record for record in listing("algorithms", tmp_path_factory.mktemp("runs"))}


def test_every_method_says_who_described_it_and_what_it_sends(records):
    assert set(records) == set(algorithms)
    for record in records.values():
        assert record["reference"] and record["what"]
        assert " up, " in record["sends"] and " down" in record["sends"]


@pytest.mark.parametrize(
    ("name", "server", "client", "up", "down"),
    [
        ("fedavg", [], [], 1, 1),
        ("fedadam", ["m", "v"], [], 1, 1),
        ("fedac", ["w"], [], 2, 2),
        ("scaffold", ["c"], ["c"], 2, 2),
        ("fedpd", ["talks"], ["dual", "own", "talks"], 1, 1),
        ("qsgd", [], [], 0.054, 1),  # 1/20 for the trits, 1/256 for the units
        ("dore", ["h", "e"], ["h"], 0.054, 0.054),
    ],
)
def test_state_memory_and_messages(name, server, client, up, down, records):
    record = records[name]
    assert (record["server_state"], record["client_memory"]) == (server, client)
    assert (record["models_up"], record["models_down"]) == (up, down)


def test_sentences_agree_with_lengths(records):
    for name, record in records.items():
        up, down = record["sends"].split(" up, ")
        for said, models in ((up, record["models_up"]), (down, record["models_down"])):
            assert ("encoded" in said) == (models < 1), name
            assert ("2 models" in said or "control variate" in said) == (models == 2), name


@dataclass(frozen=True, kw_only=True)
class Unsaid(FedAvg):
    sends = ""

    def init_mode(self, theta):
        return {"theta": theta, "pace": torch.zeros_like(theta)}

    def broadcast(self, mode):
        return mode


@dataclass(frozen=True, kw_only=True)
class NeedsASetting(FedAvg):
    reference = "Mine 2030"
    must: int


def test_methods_from_outside():
    assert describe_method(Unsaid)["sends"] == "theta up, theta + pace down"
    assert describe_method(NeedsASetting) == {"reference": "Mine 2030"}  # it cannot be tried


def test_table(records):
    table = listing_table("algorithms", list(records.values()))
    assert {"server state", "client memory", "sends", "models up", "models down"} <= set(table.header)
    assert "dual, own, talks" in next(row for row in table.rows if row[0] == "fedpd")
