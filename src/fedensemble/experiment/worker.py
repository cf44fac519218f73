"""A rank that only trains: it goes through a run's rounds in step with rank 0, which writes, tests
and reports.
"""

from __future__ import annotations

from ..config.schema import Config
from ..engines.distributed.process_group import ProcessGroup
from ..errors import RankError
from .interrupt import interruptible
from .setup import assemble, end_round, meet, resume


def follow(config: Config, ranks: ProcessGroup) -> None:
    """Takes part in the run that rank 0 carries out."""
    try:
        with interruptible(lambda text: None) as interruption:  # rank 0 says it
            if meet(config, ranks):
                return
            _, federation, _ = assemble(config, ranks)
            resume(federation, None, ranks)
            for _ in federation.rounds(config.rounds - federation.round):
                save, stop = end_round(ranks, interruption.asked)
                if save:
                    federation.checkpoint_tensors()
                if stop:
                    raise KeyboardInterrupt
    except RankError as error:
        again = "Its last checkpoint is intact; start the same command again to go on."
        raise RankError(f"{error} {again}", error.heard) from None
