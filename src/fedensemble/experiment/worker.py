"""Ranks other than 0 under torchrun: they only train; rank 0 evaluates and writes the files."""

from __future__ import annotations

from ..config.schema import Config
from ..engines.distributed.process_group import ProcessGroup
from ..errors import RankError
from ..federation.mode_bank import own_models
from .interrupt import interruptible
from .setup import assemble, check_ranks_agree, end_round, resume


def follow_rank0(config: Config, ranks: ProcessGroup) -> None:
    """Trains the rounds of a run in step with rank 0.

    The sequence of collective calls must be that of `run_steps` on rank 0, or the job hangs.
    """
    try:
        with interruptible(lambda text: None) as interruption:  # rank 0 prints the message
            if check_ranks_agree(config, ranks):
                return
            _, federation, _ = assemble(config, ranks)
            resume(federation, None, ranks)
            for report in federation.rounds(config.rounds - federation.round):
                tested = report.round == config.last_test(report.round)
                if tested and federation.algorithm.personal:
                    own_models(federation)  # rank 0 gets the models of this rank's clients
                save, stop = end_round(ranks, interruption.requested)
                if save:
                    federation.checkpoint_tensors()  # sends this rank's client state to rank 0
                if stop:
                    raise KeyboardInterrupt
    except RankError as error:
        advice = "Its last checkpoint is intact; start the same command again to go on."
        raise RankError(f"{error} {advice}", error.reported) from None
