# SPDX-License-Identifier: Apache-2.0
"""The callbacks of every run, in order."""

from collections.abc import Iterable

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.data_check import DataCheck
from megatron.bridge.training.callbacks.data_position import DataPosition
from megatron.bridge.training.callbacks.evaluation import Evaluation
from megatron.bridge.training.callbacks.exit import ExitInterval
from megatron.bridge.training.callbacks.finite import FiniteGradients
from megatron.bridge.training.callbacks.folder import RunFolder
from megatron.bridge.training.callbacks.garbage import GarbageCollection
from megatron.bridge.training.callbacks.hangs import HangDetection
from megatron.bridge.training.callbacks.logging import Logging
from megatron.bridge.training.callbacks.params import GatherParams
from megatron.bridge.training.callbacks.preemption import Preemption
from megatron.bridge.training.callbacks.profiling import ProfilesWritten, Profiling
from megatron.bridge.training.callbacks.record import RunRecord
from megatron.bridge.training.callbacks.rerun import Rerun, SkipBatches
from megatron.bridge.training.callbacks.saving import Saving
from megatron.bridge.training.callbacks.stragglers import Stragglers
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.nvrx_straggler import NVRxStragglers


def _watches(config: ConfigContainer) -> list[Callback]:
    minutes, straggler = config.dist.hang_timeout_minutes, config.straggler
    hangs = [] if minutes is None else [HangDetection(minutes)]
    gpus = config.nvrx_straggler
    slow: list[Callback] = [] if straggler is None else [Stragglers(straggler)]
    if gpus is not None and gpus.enabled:
        slow.append(NVRxStragglers(gpus))
    return [*hangs, *slow]


def _profiles(config: ConfigContainer) -> tuple[list[Callback], list[Callback]]:
    """What begins profiles, and what ends them."""
    if config.profiling is None:
        return [], []
    profiling = Profiling(config)
    return [profiling], [ProfilesWritten(config.profiling, profiling)]


def default_callbacks(
    config: ConfigContainer, users: Iterable[Callback] = (), monitor: Callback | None = None
) -> CallbackManager:
    """Framework features around the user's callbacks; the order is the order of the calls."""
    profiling, written = _profiles(config)
    rerun = config.rerun_state_machine
    repeats = [] if rerun is None else [Rerun(rerun, bool(config.model.fp16))]
    return CallbackManager(
        [
            *([] if monitor is None else [monitor]),  # a step is over when the others look at it
            *_watches(config),  # from the first hook of the others on
            RunFolder(config.checkpoint),  # before anything is written there
            RunRecord(config),  # the resolved config is on disk before anything can fail
            *profiling,  # the step alone
            GarbageCollection(config.train),
            DataPosition(),  # before anything is drawn
            DataCheck(),  # a look at the data costs less than a wrong run
            GatherParams(),  # after the last step, before anyone reads the weights
            Logging(config),  # a step is shown before it is evaluated
            *written,  # the time this takes is not shown as the step's
            FiniteGradients(),  # a ruined step is shown, but neither evaluated nor saved
            Evaluation(config),
            *users,  # what they change at a step is part of that step's checkpoint
            *repeats,  # on the batches as users see them
            Saving(),  # before the next batch is drawn
            Preemption(config),  # every rank has done with the step
            ExitInterval(config.train),  # a run stops only after it was saved
            SkipBatches(config),  # when all have done with the step
        ]
    )
