"""The table of minibatches against a plain Python reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble import prng
from fedensemble.core.visits.batches import LocalWork, batch_table


def reference(key, size, work):
    """Rows of each local step of one client, as a list of lists; nothing shared with the
    implementation but draws.
    """
    batches, epoch = [], 0
    while True:
        order = prng.permutation(prng.fold_in(key, epoch), size).tolist()
        pieces = [order[at : at + work.batch_size] for at in range(0, size, work.batch_size)]
        if work.last_batch == "drop" and len(pieces) > 1 and len(pieces[-1]) < work.batch_size:
            pieces.pop()
        if work.last_batch != "keep":
            for piece in pieces:
                filler = 0
                while len(piece) < work.batch_size:
                    piece.append(order[filler % size])
                    filler += 1
        batches += pieces
        epoch += 1
        if work.steps is None and epoch == work.epochs:
            return batches
        if work.steps is not None and len(batches) >= work.steps:
            return batches[: work.steps]


WORKS = st.builds(
    LocalWork,
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 12),
    batch_size=st.integers(1, 8),
    last_batch=st.sampled_from(["keep", "wrap", "drop"]),
)
CLIENTS = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(1, 20)), min_size=1, max_size=6
)


@settings(max_examples=250, deadline=None)
@given(CLIENTS, WORKS)
def test_against_the_reference(clients, work):
    keys, sizes = (
        torch.tensor([key for key, _ in clients]),
        torch.tensor([size for _, size in clients]),
    )
    rows, weights = batch_table(keys, sizes, work)
    assert (
        rows.shape == weights.shape == (int(work.count(sizes).max()), len(clients), work.batch_size)
    )
    # filler, too, is the client's own
    assert bool(((rows >= 0) & (rows < sizes.reshape(1, -1, 1))).all())
    for j, (key, size) in enumerate(clients):
        expected = reference(key, size, work)
        assert len(expected) == int(work.count(sizes)[j])
        for step in range(len(rows)):
            counted = rows[step, j][weights[step, j].bool()].tolist()
            assert counted == (expected[step] if step < len(expected) else [])


@settings(max_examples=100, deadline=None)
@given(CLIENTS, st.integers(1, 3), st.integers(1, 8))
def test_keep_covers_every_example_once_an_epoch(clients, epochs, batch_size):
    work = LocalWork(epochs=epochs, batch_size=batch_size)
    keys, sizes = (
        torch.tensor([key for key, _ in clients]),
        torch.tensor([size for _, size in clients]),
    )
    rows, weights = batch_table(keys, sizes, work)
    an_epoch = work.steps_per_epoch(sizes)
    for j, (_, size) in enumerate(clients):
        for epoch in range(epochs):
            steps = slice(epoch * int(an_epoch[j]), (epoch + 1) * int(an_epoch[j]))
            assert sorted(rows[steps, j][weights[steps, j].bool()].tolist()) == list(range(size))
    assert weights.sum((0, 2)).tolist() == [epochs * size for _, size in clients]


@settings(max_examples=50, deadline=None)
@given(CLIENTS, WORKS)
def test_a_visit_does_not_depend_on_its_neighbours(clients, work):
    keys, sizes = (
        torch.tensor([key for key, _ in clients]),
        torch.tensor([size for _, size in clients]),
    )
    rows, weights = batch_table(keys, sizes, work)
    alone, weight = batch_table(keys[:1], sizes[:1], work)
    assert torch.equal(rows[: len(alone), 0][weight[:, 0].bool()], alone[:, 0][weight[:, 0].bool()])
    assert torch.equal(weights[: len(alone), 0], weight[:, 0])
    assert not bool(weights[len(alone) :, 0].any())


def test_epochs_have_different_orders():
    rows, _ = batch_table(torch.tensor([1]), torch.tensor([20]), LocalWork(epochs=2, batch_size=20))
    assert not torch.equal(rows[0], rows[1])
