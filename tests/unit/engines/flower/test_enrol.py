"""Who counts as which client: identity is proven by a key, and nobody takes another's place."""

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

import fedensemble as fe
from fedensemble.engines.flower.client import answer_with_problem
from fedensemble.engines.flower.enrolment import FIRST_RETRY, EnrolmentProblems
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


class Unable:
    """A client that cannot load its data until it is repaired."""

    def __init__(self, client, problem):
        self.client, self.problem, self.asked = client, problem, 0

    def answer_query(self, message, context):
        self.asked += 1
        if self.problem is None:
            return self.client.answer_query(message, context)
        return answer_with_problem(message, context, self.problem)


MISSING = "cannot load its data: FileNotFoundError: no such file: '/srv/x.csv'"


@pytest.mark.parametrize("identity", ["name", "key", "partition"])
def test_a_client_that_cannot_load_its_data_is_named_and_not_called_absent(identity):
    fleet = named_fleet(identity)
    fleet.node(2).client = Unable(fleet.node(2).client, MISSING)
    with pytest.raises(fe.InputError) as caught:
        fleet.roster.enrol(6, 100.0)
    name = "partition-2" if identity == "partition" else "clinic-10"
    assert [line for line in fleet.log_lines if "FileNotFound" in line] == [f"{name} {MISSING}."]
    text = str(caught.value)
    assert "5 of 6 clients are enrolled after 100 s" in text
    assert f"unable to enrol: 1 ({name} {MISSING})" in text and "Repair" in text
    assert "Start their SuperNodes" not in text and "without a reply" not in text
    # It is asked again, but each question costs its machine a process: seldom.
    assert 3 <= fleet.node(2).client.asked <= 8


def test_a_repaired_client_enrols_without_a_new_start():
    fleet = named_fleet("name")
    unable = fleet.node(2).client = Unable(fleet.node(2).client, MISSING)
    sleep = fleet.time.sleep

    def repair(seconds):
        sleep(seconds)
        if fleet.time.now() > 20:
            unable.problem = None

    fleet.time.sleep = repair
    fleet.roster.enrol(6, 100.0)
    assert len(fleet.roster) == 6 and 20 < fleet.time.now() < 60


def test_clients_that_are_slow_to_reply_are_told_apart_from_absent_ones():
    fleet = named_fleet("name")
    for client in (0, 1):
        fleet.node(client).delay = 1000.0
    with pytest.raises(fe.InputError) as caught:
        fleet.roster.enrol(7, 70.0)
    text = str(caught.value)
    assert "4 of 7 clients" in text and "without a reply so far: 2 (clinic-" in text
    assert "n cores" in text and "`enrol-timeout`" in text and "Not connected: 1." in text
    progress = [line for line in fleet.log_lines if line.startswith("4 of 7 clients are enrolled")]
    assert len(progress) == 2 and "2 have not replied yet, 0 cannot" in progress[0]


def test_text_of_a_client_cannot_forge_lines_of_the_log():
    problems = EnrolmentProblems()
    assert problems.add(1, "clinic-1 says\n\x1b[2J" + "x" * 1000, now=0.0)
    assert "\n" not in problems.reasons[1] and len(problems.reasons[1]) <= 200
    assert not problems.may_ask(1, FIRST_RETRY - 1) and problems.may_ask(1, FIRST_RETRY)
    problems.remove(1)
    assert problems.may_ask(1, 0.0) and not problems.among([1])
