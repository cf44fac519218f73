"""Answers that must not count: each is refused and named, and the round is what it is without that
client.
"""

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import fedensemble as fe
from fedensemble.engines.flower.deadline import RoundTimeout
from fedensemble.engines.flower.messages import RESULT, UPLOAD, VISIT, pack, unpack
from fedensemble.engines.flower.reply_validation import Limits
from fedensemble.testing.toy_problems import small_federation

from .fake import FIRST_NODE, FakeFleet

BAD = 2  # the client that misbehaves; it is asked in every round
NAME = f"partition-{BAD}"


def change(record, **values):
    """A misbehavior: some values of a record are others."""

    def bend(message, answer):
        kind = ConfigRecord if record == VISIT else MetricRecord
        answer.content[record] = kind({**answer.content[record], **values})
        return [answer]

    return bend


def upload(make):
    """A misbehavior: another upload."""

    def bend(message, answer):
        answer.content[UPLOAD] = make(unpack(answer.content, UPLOAD))
        return [answer]

    return bend


def one_value(value):
    def make(tree):
        tree["theta"][3] = value
        return pack(tree)

    return upload(make)


def without(record):
    def bend(message, answer):
        del answer.content[record]
        return [answer]

    return bend


def garbage(data, **said):
    """An array whose bytes are not what it says."""

    def make(tree):
        size = len(tree["theta"])
        facts = {"dtype": "float64", "shape": (size,), "stype": "numpy.ndarray", **said}
        return ArrayRecord({"theta": Array(data=data, **facts)})

    return upload(make)


def another_header(tree):
    """Bytes that claim to be a model of a trillion numbers."""
    array = Array(tree["theta"].numpy())
    data = array.data.replace(f"({len(tree['theta'])},)".encode(), b"(1000000000000,)")
    return ArrayRecord({"theta": Array("float64", (len(tree["theta"]),), "numpy.ndarray", data)})


def cut_short(tree):
    array = Array(tree["theta"].numpy())
    return ArrayRecord({"theta": Array(array.dtype, array.shape, array.stype, array.data[:-3])})


def another_kind(message, answer):
    answer.content[UPLOAD] = MetricRecord({"theta": 1.0})
    return [answer]


def oversized(tree):
    """The right values, and twenty megabytes behind them."""
    array = Array(tree["theta"].numpy())
    return ArrayRecord(
        {"theta": Array(array.dtype, array.shape, array.stype, array.data + bytes(20_000_000))}
    )


def with_record(message, answer):
    answer.content["luggage"] = ArrayRecord({"more": Array(torch.zeros(1000).numpy())})
    return [answer]


def swapped(tree):
    """A model of the right length whose bytes are of another type."""
    data = Array(tree["theta"].to(torch.int64).numpy()).data
    return ArrayRecord({"theta": Array("float64", (len(tree["theta"]),), "numpy.ndarray", data)})


CASES = {
    "wrong shape": (upload(lambda tree: pack({"theta": tree["theta"][:-1]})), "shape"),
    "two axes": (upload(lambda tree: pack({"theta": tree["theta"].unsqueeze(0)})), "shape"),
    "wrong type": (upload(lambda tree: pack({"theta": tree["theta"].float()})), "type float32"),
    "wrong name": (upload(lambda tree: pack({"weights": tree["theta"]})), "names"),
    "one name too many": (upload(lambda tree: pack({**tree, "more": tree["theta"]})), "names"),
    "no array": (upload(lambda tree: ArrayRecord({})), "names"),
    "nan": (one_value(float("nan")), "not finite"),
    "infinity": (one_value(float("inf")), "not finite"),
    "huge": (one_value(1e30), "above 1e+06"),
    "undecodable": (garbage(b"\x00" * 40), "cannot be decoded"),
    "a pickle": (garbage(b"\x80\x04\x95."), "cannot be decoded"),
    "cut short": (upload(cut_short), "cannot be decoded"),
    "unknown serialization": (garbage(b"", stype="pickle"), "cannot be decoded"),
    "lying header": (upload(another_header), "cannot be decoded"),
    "other type inside": (upload(swapped), "cannot be decoded"),
    "wrong mode": (change(VISIT, mode=1), "mode 1"),
    "another round": (change(VISIT, round=7), "round 7"),
    "another client": (change(VISIT, client=0), "client 0"),
    "another training": (change(VISIT, training="other"), "training"),
    "mode in words": (change(VISIT, mode="0"), "not that of a visit"),
    "no examples": (change(RESULT, examples=0), "0 examples"),
    "negative examples": (change(RESULT, examples=-5), "-5 examples"),
    "too many examples": (change(RESULT, examples=10**15), "examples"),
    "examples as a float": (change(RESULT, examples=5.0), "'examples' is 5.0"),
    "nan loss": (change(RESULT, loss=float("nan")), "loss is nan"),
    "infinite loss": (change(RESULT, loss=float("inf")), "loss is inf"),
    "a loss whose mean is infinite": (change(RESULT, loss=1.7e308), "plausible"),
    "too many bytes": (upload(oversized), "bytes where"),
    "one record too many": (with_record, "such as 'luggage'"),
    "one number too many": (change(RESULT, note=1.0), "such as 'note'"),
    "one word too many": (change(VISIT, note="x" * 5_000_000), "such as 'note'"),
    "a long word": (change(VISIT, training="x" * 5_000_000), "training xxx"),
    "a forged line of the log": (
        change(VISIT, training="t\nround 3: fine\x1b[2J"),
        r"t\nround 3: fine\x1b[2J",
    ),
    "no upload": (without(UPLOAD), "no record 'upload'"),
    "no result": (without(RESULT), "'examples' is None"),
    "no visit": (without(VISIT), "no record 'visit'"),
    "an upload of another kind": (another_kind, "no record"),
    "nothing at all": (lambda m, a: [Message(RecordDict(), reply_to=m)], "no record"),
}


def make_fleet(limits=None):
    federation = small_federation(fe.FedAvg(), "loop", modes=2, strata=1)
    federation.schedule = fe.Stratified(modes=2, strata=1, clients_per_round=6)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=20.0), "limits": limits})
    fleet.serve()
    return fleet


@pytest.fixture(scope="module")
def honest():
    """Modes after a round of the same fleet without the bad client."""
    fleet = make_fleet()
    fleet.node(BAD).online = False
    fleet.rounds(1)
    return fleet.state.modes["theta"]


@pytest.mark.parametrize("case", CASES)
def test_refused_named_and_nothing_lost(case, honest, caplog):
    fleet = make_fleet()
    fleet.node(BAD).bend, reason = CASES[case]
    caplog.set_level("WARNING", "flwr")
    [(report, log)] = fleet.rounds(1)
    assert list(log.refused) == [NAME] and reason in log.refused[NAME], log
    assert f"node {FIRST_NODE + BAD}" in log.refused[NAME]
    assert len(log.refused[NAME]) <= 200 and log.refused[NAME].isprintable()
    assert not log.lost and BAD not in report.plan.client.tolist() and len(report.plan.client) == 5
    assert torch.equal(fleet.state.modes["theta"], honest)
    assert int(fleet.engine.counted[BAD].max()) == -1
    fleet.node(BAD).bend = lambda message, answer: [answer]  # it mends its ways
    [(report, log)] = fleet.rounds(1)
    assert BAD in report.plan.client.tolist() and not log.refused


def test_a_replayed_answer_is_refused(honest):
    fleet = make_fleet()
    kept = []
    fleet.node(BAD).bend = lambda message, answer: kept.append(answer) or [answer]
    fleet.rounds(1)

    def replay(message, answer):
        """Last round's words as an answer to this round's message."""
        return [Message(kept[0].content, reply_to=message)]

    fleet.node(BAD).bend = replay
    [(_, log)] = fleet.rounds(1)
    assert "round 0, where 1 was sent" in log.refused[NAME]


def test_a_second_answer_to_one_message_does_not_count_twice():
    plain = make_fleet()
    plain.rounds(2)
    fleet = make_fleet()
    fleet.node(BAD).bend = lambda message, answer: [
        answer,
        Message(answer.content, reply_to=message),
    ]
    logs = fleet.rounds(2)
    assert torch.equal(fleet.state.modes["theta"], plain.state.modes["theta"])
    assert all(len(log.stray) == 1 for _, log in logs)


def test_an_answer_in_somebody_elses_name_does_not_count():
    plain = make_fleet()
    plain.rounds(1)
    fleet = make_fleet()

    def impersonate(message, answer):
        """Besides its own answer, one to the message that was sent to client 0, if that is
        known.
        """
        stranger = Message(answer.content, reply_to=message)
        mine = [m for m in fleet.grid.sent if m.metadata.dst_node_id == FIRST_NODE][-1]
        stranger.metadata.__dict__["_reply_to_message_id"] = mine.metadata.message_id
        return [answer, stranger]

    fleet.node(BAD).bend, fleet.node(BAD).delay = impersonate, 0.1
    fleet.node(0).delay = 5.0
    [(report, log)] = fleet.rounds(1)
    assert log.stray == [f"node {FIRST_NODE + BAD}"] and 0 in report.plan.client.tolist()
    assert torch.equal(fleet.state.modes["theta"], plain.state.modes["theta"])


def test_answers_to_nothing_are_counted_as_strays():
    fleet = make_fleet()

    def invent(message, answer):
        stray = Message(answer.content, reply_to=message)
        stray.metadata.__dict__["_reply_to_message_id"] = "nothing"
        return [answer, stray]

    fleet.node(BAD).bend = invent
    [(report, log)] = fleet.rounds(1)
    assert log.stray == [f"node {FIRST_NODE + BAD}"] and len(report.plan.client) == 6


def test_an_encoding_that_cannot_be_read_is_refused():
    federation = small_federation(
        fe.QSGD(compressor="rand-k", share=0.03), "loop", modes=1, strata=1
    )
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=20.0)})
    fleet.serve()
    client = int(federation.schedule.plan(federation.state.schedule, 0).client[0])
    fleet.node(client).bend = upload(
        lambda tree: pack({"change": torch.full_like(tree["change"], 255)})
    )
    [(report, log)] = fleet.rounds(1)
    assert (
        "cannot be read" in log.refused[f"partition-{client}"]
        or "not finite" in log.refused[f"partition-{client}"]
    )
    assert len(report.plan.client) == 3


def test_an_app_that_fails_is_lost_not_refused():
    from flwr.app import Error

    fleet = make_fleet()
    fleet.node(BAD).bend = lambda message, answer: [Message(Error(0, "no disk"), reply_to=message)]
    [(_, log)] = fleet.rounds(1)
    assert log.lost == {NAME: "no disk"} and not log.refused


def test_a_long_update_is_clipped_to_its_length():
    clip = 0.01
    fleet = make_fleet(Limits(clip=clip))
    start = fleet.state.modes["theta"].clone()
    [(report, _)] = fleet.rounds(1)
    moved = (fleet.state.modes["theta"] - start).norm(dim=-1)
    trained = report.trained[0]
    assert 0 < float(moved[trained]) <= clip * (1 + 1e-9) and float(moved[1 - trained]) == 0
    free = make_fleet()
    free.rounds(1)
    assert float((free.state.modes["theta"] - start).norm(dim=-1)[trained]) > 2 * clip


@pytest.mark.parametrize(
    ("bend", "reason"),
    [
        (lambda r: r | {"examples": 0}, "0 examples"),
        (lambda r: r | {"examples": 10**12}, "plausible"),
        (lambda r: r | {"examples": 1.5}, "'examples' is 1.5"),
        (lambda r: {"partition": 1}, "'examples' is None"),
        (lambda r: r | {"partition": -1}, "partition-id"),
    ],
)
def test_who_introduces_itself_badly_is_not_enrolled(bend, reason):
    federation = small_federation(fe.FedAvg(), "loop", modes=1, strata=1)
    fleet = FakeFleet(federation)
    node = fleet.node(BAD)
    plain = node.client.answer_query

    def answer_query(message, context):
        answer = plain(message, context)
        answer.content[RESULT] = MetricRecord(bend({**answer.content[RESULT]}))
        return answer

    node.client.answer_query = answer_query
    fleet.roster.enrol(5, 30.0)
    assert len(fleet.roster) == 5 and NAME not in [member.name for member in fleet.roster.members]
    assert reason in " ".join(fleet.log_lines)


def test_too_few_clients_are_named():
    federation = small_federation(fe.FedAvg(), "loop", modes=1, strata=1)
    fleet = FakeFleet(federation)
    fleet.roster.identity = "partition"
    with pytest.raises(fe.InputError, match="6 of 7 clients are enrolled after 10 s") as caught:
        fleet.roster.enrol(7, 10.0)
    text = str(caught.value)
    assert "partition-0" in text and "Not connected: 1." in text and "unable" not in text
