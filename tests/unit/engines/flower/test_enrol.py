"""Who counts as which client: identity is proven by a key, and nobody takes another's place."""

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

import fedensemble as fe
from fedensemble.engines.flower.roster import Member
from fedensemble.testing.toy_problems import small_federation

from .fake import FIRST_NODE, FakeFleet, Node


def named_fleet(identity):
    fleet = FakeFleet(small_federation(fe.FedAvg(), "loop", modes=1, strata=1))
    for client in range(6):
        fleet.node(client).name = f"clinic-{12 - client}"
    fleet.roster.identity = identity
    return fleet


@pytest.mark.parametrize("identity", ["name", "key", "auto"])
def test_clients_keep_the_order_of_their_names_and_their_proof(identity):
    fleet = named_fleet(identity)
    fleet.roster.enrol(6, 10.0)
    assert [member.name for member in fleet.roster.members] == [f"clinic-{n}" for n in range(7, 13)]
    proofs = [member.identity for member in fleet.roster.members]
    keys = [
        sha256((FIRST_NODE + client).to_bytes(4, "big")).hexdigest()
        for client in reversed(range(6))
    ]
    assert proofs == ([f"clinic-{n}" for n in range(7, 13)] if identity == "name" else keys)


def test_one_node_without_a_name_does_not_make_auto_believe_partitions():
    fleet = named_fleet("auto")
    fleet.node(3).name = ""
    fleet.roster.enrol(6, 10.0)
    assert fleet.roster.identity == "key" and "by their public keys" in " ".join(fleet.log_lines)
    nameless = (
        fleet.roster.members[-1] if fleet.roster.members[-1].name.startswith("key-") else None
    )
    assert nameless is not None and nameless.identity.startswith(nameless.name.removeprefix("key-"))


def test_without_registration_auto_says_that_partitions_prove_nothing():
    fleet = FakeFleet(small_federation(fe.FedAvg(), "loop", modes=1, strata=1))
    fleet.roster.enrol(6, 10.0)
    assert fleet.roster.identity == "partition" and "proves nothing" in " ".join(fleet.log_lines)


@pytest.mark.parametrize("identity", ["name", "partition"])
@pytest.mark.parametrize("before", [True, False], ids=["before enrolment", "after enrolment"])
def test_a_second_node_of_a_client_is_refused_while_the_first_is_there(identity, before):
    """The newest used to get the visits, and nothing was logged."""
    fleet = named_fleet(identity)
    twin = Node(fleet.client(2), 2, name=fleet.node(2).name)
    number = FIRST_NODE + 50
    if before:
        fleet.nodes[number] = twin
    fleet.roster.enrol(6, 10.0)
    fleet.nodes[number] = twin
    client = next(
        i
        for i, member in enumerate(fleet.roster.members)
        if member.name.endswith(("clinic-10", "-2"))
    )
    for _ in range(3):
        fleet.time.sleep(1.0)
        assert fleet.roster.find_nodes(10.0)[client] == FIRST_NODE + 2
        assert number not in fleet.roster.find_nodes(10.0).values()
    refusals = [line for line in fleet.log_lines if f"Node {number} is rejected" in line]
    assert len(refusals) == 1 and "already" in refusals[0], fleet.log_lines
    # A node that was started again, without registration, has a new number: it is taken once the
    # old one is gone.
    fleet.node(2).online = False
    assert fleet.roster.find_nodes(10.0)[client] == number
    fleet.node(2).online = True
    assert fleet.roster.find_nodes(10.0)[client] == number, "who holds a place keeps it"


@pytest.mark.parametrize("before", [True, False], ids=["before enrolment", "after enrolment"])
def test_a_key_registered_under_the_name_of_another_client_is_refused(before):
    fleet = named_fleet("key")
    number = FIRST_NODE + 50
    thief = Node(fleet.client(2), 2, name="clinic-10")
    if before:
        fleet.nodes[number] = thief
    fleet.roster.enrol(6, 10.0)
    fleet.nodes[number] = thief
    fleet.node(2).online = False
    fleet.roster.find_nodes(10.0)
    fleet.time.sleep(1.0)
    assert len(fleet.roster) == 6 and number not in fleet.roster.find_nodes(10.0).values()
    assert [
        line
        for line in fleet.log_lines
        if f"Node {number} is rejected" in line and "clinic-10" in line
    ], fleet.log_lines


def test_rosters_of_version_0_1_are_read():
    assert Member.from_record(["clinic-1", 5], "name") == Member("clinic-1", 5, "clinic-1")
    old = Member.from_record([b"key".hex(), 5], "key")
    assert (old.name, old.identity) == (b"key".hex(), sha256(b"key").hexdigest())
    new = Member("clinic-1", 5, "abc")
    assert Member.from_record(new.to_record(), "key") == new


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["name", "partition", "key"]),
    st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=6),
)
def test_whoever_comes_and_goes_a_client_has_one_node_which_keeps_its_place(identity, present):
    """Nodes 0 to 5 are the clients', 6 to 11 claim to be the same."""
    fleet = named_fleet(identity)
    fleet.roster.enrol(6, 10.0)
    twins = {
        FIRST_NODE + 6 + i: Node(fleet.client(i), i, name=fleet.node(i).name) for i in range(6)
    }
    fleet.nodes.update(twins)
    members = [member.name for member in fleet.roster.members]
    owner = {
        node: members.index(f"partition-{n.partition}" if identity == "partition" else n.name)
        for node, n in fleet.nodes.items()
    }
    before = fleet.roster.find_nodes(10.0)
    for online in present:
        for number, node in fleet.nodes.items():
            node.online = number - FIRST_NODE in online
        fleet.time.sleep(1.0)
        fleet.roster.find_nodes(10.0)  # whoever is new is asked,
        fleet.time.sleep(1.0)
        now = fleet.roster.find_nodes(10.0)  # and has answered
        assert len(set(now.values())) == len(now) and all(
            owner[node] == client for client, node in now.items()
        )
        assert all(
            now[client] == node for client, node in before.items() if node - FIRST_NODE in online
        )
        known = {
            number
            for number in fleet.nodes
            if number - FIRST_NODE in online and not (identity == "key" and number in twins)
        }
        assert set(now) == {owner[number] for number in known}, (
            "nobody is left out for whom there is a node"
        )
        before = now
