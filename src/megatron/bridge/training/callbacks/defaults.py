# SPDX-License-Identifier: Apache-2.0
"""The default callbacks of a run, in order."""

from collections.abc import Iterable

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.core.data_position import DataPosition
from megatron.bridge.training.callbacks.core.evaluation import Evaluation
from megatron.bridge.training.callbacks.core.exit import ExitInterval, ParamGather
from megatron.bridge.training.callbacks.core.garbage_collection import GarbageCollection
from megatron.bridge.training.callbacks.core.hf_copies import HFCopies
from megatron.bridge.training.callbacks.core.run_lock import RunLock
from megatron.bridge.training.callbacks.core.run_metadata import RunMetadata
from megatron.bridge.training.callbacks.core.saving import CheckpointSaving
from megatron.bridge.training.callbacks.guard.hang_detection import HangDetection
from megatron.bridge.training.callbacks.guard.preemption import Preemption
from megatron.bridge.training.callbacks.guard.rerun import NaNGuard, Rerun, SkipBatches
from megatron.bridge.training.callbacks.guard.straggler_detection import StragglerDetection
from megatron.bridge.training.callbacks.observe.data_preview import DataPreview
from megatron.bridge.training.callbacks.observe.logging import Logging
from megatron.bridge.training.callbacks.observe.profiling import Profiling, StopProfiling
from megatron.bridge.training.callbacks.observe.sample_generation import GenerationSamples
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.resiliency.nvrx_straggler import NVRxStragglerDetection


def _hang_and_straggler_detection(config: ConfigContainer) -> list[Callback]:
    callbacks: list[Callback] = []
    if config.dist.hang_timeout_minutes is not None:
        callbacks.append(HangDetection(config.dist.hang_timeout_minutes))
    if config.straggler is not None:
        callbacks.append(StragglerDetection(config.straggler))
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled:
        callbacks.append(NVRxStragglerDetection(config.nvrx_straggler))
    return callbacks


def _profiling(config: ConfigContainer) -> tuple[list[Callback], list[Callback]]:
    """The callbacks that start profiling and that stop it."""
    if config.profiling is None:
        return [], []
    profiling = Profiling(config)
    return [profiling], [StopProfiling(config.profiling, profiling)]


def default_callbacks(
    config: ConfigContainer, users: Iterable[Callback] = (), monitor: Callback | None = None
) -> CallbackManager:
    """The framework's callbacks around the user's, in the order in which their hooks are called."""
    start_profiling, stop_profiling = _profiling(config)
    rerun = config.rerun_state_machine
    reruns = [] if rerun is None else [Rerun(rerun, bool(config.model.fp16))]
    return CallbackManager(
        [
            *([] if monitor is None else [monitor]),  # first, so that the step ends before the other callbacks run
            *_hang_and_straggler_detection(config),  # watches the hooks of all later callbacks
            RunLock(config.checkpoint),  # before anything is written to the folder
            RunMetadata(config),  # the resolved config is on disk before anything can fail
            *start_profiling,  # profiles the step alone
            GarbageCollection(config.train),
            DataPosition(),  # before any data is read
            DataPreview(),  # before any time is spent on wrong data
            ParamGather(),  # after the last step, before anything reads the weights
            Logging(config),  # a step is logged before it is evaluated
            *stop_profiling,  # writing profiles does not count as time of the step
            NaNGuard(),  # a step with NaN is logged, but neither evaluated nor saved
            Evaluation(config),
            *GenerationSamples.of(config),
            *users,  # their changes at a step belong to the checkpoint of that step
            *reruns,  # on the batches as the user's callbacks see them
            CheckpointSaving(),  # before the next batch is read
            *([HFCopies()] if config.checkpoint.also_hf else []),  # of what is published
            Preemption(config),  # when every rank is done with the step
            ExitInterval(config.train),  # a run stops only after it is saved
            SkipBatches(config),  # last, when all callbacks are done with the step
        ]
    )
