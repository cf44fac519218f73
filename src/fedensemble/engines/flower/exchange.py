"""Messages out over Flower's Grid, and the replies to them as they come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid


class Reply(NamedTuple):
    """A message that came in."""

    # which of the messages sent it answers; None if it is nothing that was waited for
    place: int | None
    message: Message


@dataclass
class Clock:
    """Time; tests have their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Exchange:
    """Messages sent together, and who still owes a reply."""

    grid: Grid
    messages: Sequence[Message]
    waiting: dict[str, int] = field(default_factory=dict)  # message id -> index
    unsent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        ids = list(self.grid.push_messages(self.messages)) if self.messages else []
        # none at all come back if they were too much for one request
        ids += [""] * (len(self.messages) - len(ids))
        for index, name in enumerate(ids):
            if name:
                self.waiting[name] = index
            else:
                self.unsent.append(index)

    def look(self) -> list[Reply]:
        """What has come in since the last look, in the order of the messages sent."""
        replies = []
        for message in self.grid.pull_messages(list(self.waiting)) if self.waiting else ():
            told = message.metadata.reply_to_message_id
            index = self.waiting.get(told)
            # Flower itself reports a node that is gone; everybody else can only answer what was
            # sent to them.
            if index is not None and not message.has_error():
                index = (
                    index
                    if message.metadata.src_node_id == self.messages[index].metadata.dst_node_id
                    else None
                )
            if index is not None:
                del self.waiting[told]
            replies.append(Reply(index, message))
        return sorted(replies, key=lambda reply: -1 if reply.place is None else reply.place)
