"""Sends messages over Flower's Grid and receives the replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid


class IncomingMessage(NamedTuple):
    """A message that arrived."""

    sent_index: int | None  # index of the sent message that it replies to; None if unexpected
    message: Message


@dataclass
class Clock:
    """Time source; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Exchange:
    """Messages sent together, and which of them have no reply yet."""

    grid: Grid
    messages: Sequence[Message]
    waiting: dict[str, int] = field(default_factory=dict)  # message id -> index
    unsent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        ids = list(self.grid.push_messages(self.messages)) if self.messages else []
        # Flower returns no ids at all if the messages were too large for one request.
        ids += [""] * (len(self.messages) - len(ids))
        for index, message_id in enumerate(ids):
            if message_id:
                self.waiting[message_id] = index
            else:
                self.unsent.append(index)

    def poll(self) -> list[IncomingMessage]:
        """Returns the messages that arrived since the last poll, in the order of those sent."""
        incoming = []
        for message in self.grid.pull_messages(list(self.waiting)) if self.waiting else ():
            message_id = message.metadata.reply_to_message_id
            index = self.waiting.get(message_id)
            # A node may only reply to messages that were sent to it: otherwise one client could
            # reply in the name of another. Errors are exempt, because Flower itself reports a node
            # that is gone.
            if index is not None and not message.has_error():
                receiver = self.messages[index].metadata.dst_node_id
                if message.metadata.src_node_id != receiver:
                    index = None
            if index is not None:
                del self.waiting[message_id]
            incoming.append(IncomingMessage(index, message))
        return sorted(
            incoming, key=lambda entry: -1 if entry.sent_index is None else entry.sent_index
        )
