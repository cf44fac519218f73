"""Tests that `fedensemble ls` describes algorithms and options as they are."""

from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedensemble import FedAvg, Stratified
from fedensemble.algorithms.distilled.fedbe import FedBE
from fedensemble.catalog.algorithm_facts import describe_algorithm
from fedensemble.catalog.listing import listing, listing_table, option_table
from fedensemble.catalog.options import KINDS, explanations, options
from fedensemble.catalog.options_page import page
from fedensemble.cli import console
from fedensemble.config.schema import resolve
from fedensemble.core.algorithm import algorithms
from fedensemble.core.engine import engines
from fedensemble.data import partitions
from fedensemble.errors import InputError

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return {
        record["name"]: record for record in listing("algorithms", tmp_path_factory.mktemp("runs"))
    }


def test_every_algorithm_has_a_reference_and_describes_its_messages(records):
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
        ("ifca", [], ["chosen", "visits"], 1, "K"),
        ("fedem", [], ["share"], "K", "K"),
        ("qsgd", [], [], 0.054, 1),  # 1/20 for the trits, 1/256 for the units
        ("dore", ["gradient", "e", "updates"], ["gradient", "updates"], 0.054, 0.054),
    ],
)
def test_state_and_message_sizes(name, server, client, up, down, records):
    record = records[name]
    assert (record["server_state"], record["client_memory"]) == (server, client)
    assert (record["models_up"], record["models_down"]) == (up, down)


def test_descriptions_of_messages_agree_with_their_sizes(records):
    for name, record in records.items():
        up, down = record["sends"].split(" up, ")
        for text, models in ((up, record["models_up"]), (down, record["models_down"])):
            assert ("all modes" in text) == (models == "K"), name
            assert ("encoded" in text) == (models not in ("K", 0) and models < 1), name
            assert text.startswith("nothing") == (models == 0), name
            assert ("2 models" in text or "control variate" in text) == (models == 2), name


@dataclass(frozen=True, kw_only=True)
class WithoutDescription(FedAvg):
    sends = ""

    def init_mode(self, theta):
        return {"theta": theta, "pace": torch.zeros_like(theta)}

    def broadcast(self, mode):
        return mode


@dataclass(frozen=True, kw_only=True)
class NeedsASetting(FedAvg):
    reference = "Mine 2030"
    must: int


def test_algorithms_of_other_packages():
    assert describe_algorithm(WithoutDescription)["sends"] == "theta up, theta + pace down"
    assert describe_algorithm(NeedsASetting) == {"reference": "Mine 2030"}  # no dry run


def test_table(records):
    table = listing_table("algorithms", list(records.values()))
    assert table.header == ("name", "what", "sends", "options")
    brief = {row[0]: row[-1] for row in table.rows}
    assert brief["fedavg"] == ""  # lr and the like are in the title
    assert brief["fedprox"] == "mu = 0.01, stragglers = 0.0"
    assert brief["feddyn"] == "alpha = 0.1"  # weighting has the usual default
    assert "lr, lr_decay, lr_decay_every, lr_cycle, lr_cycle_end, weighting" in table.title


def test_one_algorithm(records):
    table = option_table("algorithms", records["fedpd"])
    assert "client memory: dual, own, talks" in table.title and "Zhang et al. 2021" in table.title
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["weighting"][:2] == ('"examples", "uniform"', '"examples"')
    assert rows["optimizer"][:2] == ("name or table", '"sgd"')
    assert rows["p"][2].startswith("probability that a round does not communicate")


PLACES = {
    "algorithms": lambda name, given: {"algorithm": {"name": name, **given}},
    "optimizers": lambda name, given: {"algorithm": {"optimizer": {"name": name, **given}}},
    "datasets": lambda name, given: {
        # a schema needs a shape or columns, so neither is required by itself
        "data": {
            "source": name,
            "clients": 50,
            **({"shape": [2]} if name == "schema" else {}),
            **given,
        }
    },
    "partitions": lambda name, given: {"data": {"partition": name, "clients": 50, **given}},
    "models": lambda name, given: {"model": {"name": name, **given}},
    "participations": lambda name, given: {"participation": {"name": name, **given}},
}


@pytest.mark.parametrize("what", PLACES)
def test_listed_defaults_are_those_of_a_config(what, tmp_path):
    """Writing a default into a config changes nothing; only required options must be given."""
    for record in listing(what, tmp_path):
        listed = record["options"]
        texts = {"path": "a.npz", "target": "y"}
        required = {o["name"]: texts.get(o["name"], 2) for o in listed if "default" not in o}
        defaults = {o["name"]: o["default"] for o in listed if o.get("default") is not None}
        short, long = (
            resolve({"data": {"clients": 50}} | PLACES[what](record["name"], options)).values()
            for options in (required, required | defaults)
        )
        assert short == long, record["name"]


def test_no_option_is_missing():
    """All options that a config accepts for a partition are listed."""
    kind = KINDS["partitions"]
    assert [option["name"] for option in options(kind, partitions["dirichlet"])] == [
        "alpha",
        "min_examples",
    ]
    assert [option["name"] for option in options(KINDS["engines"], engines["loop"])] == [
        "client_memory"
    ]
    assert options(KINDS["schedules"], Stratified) == []


def test_explanations_come_from_docstrings_also_of_base_classes():
    docs = explanations(FedBE)
    assert docs["server_lr"] == docs["server_lr_low"]
    # The text continues on a second line.
    assert docs["server_lr"].endswith("a student with nearly uniform ones.")
    assert docs["lr"] == "learning rate of local training." and "samples" in docs
    assert explanations(len) == {}


def test_unknown_names(tmp_path):
    with pytest.raises(InputError, match="dirichlet"):
        listing("partitions", tmp_path, "dirichle")
    with pytest.raises(InputError, match="Runs have no names"):
        listing("runs", tmp_path, "mine")


def test_brackets_reach_the_terminal(monkeypatch, tmp_path):
    """By default rich interprets [n] as markup."""
    screen = Console(file=StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(console, "console", screen)
    console.print_table(listing_table("datasets", listing("datasets", tmp_path)))
    out = screen.file.getvalue()
    assert "options go into [data]" in out and "y int64 [n]" in out
    assert max(map(len, out.splitlines())) <= 100


def test_page_is_up_to_date():
    """If this fails: python -m fedensemble.catalog.options_page > docs/ref-options.md."""
    assert (DOCS / "ref-options.md").read_text(encoding="utf-8") == page()
