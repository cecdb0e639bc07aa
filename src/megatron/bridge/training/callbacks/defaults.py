# SPDX-License-Identifier: Apache-2.0
"""The default callbacks of a run, in order."""

from collections.abc import Iterable

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.core.best_model import BestModel
from megatron.bridge.training.callbacks.core.data import DataPosition, DataPreview
from megatron.bridge.training.callbacks.core.intervals import (
    Evaluation,
    ExitInterval,
    GarbageCollection,
    ParamGather,
)
from megatron.bridge.training.callbacks.core.qk_clip import QKClip
from megatron.bridge.training.callbacks.core.run_folder import RunLock, RunMetadata
from megatron.bridge.training.callbacks.core.saving import CheckpointSaving, HFCopies
from megatron.bridge.training.callbacks.guard.hang_detection import HangDetection
from megatron.bridge.training.callbacks.guard.nan_guard import NaNGuard
from megatron.bridge.training.callbacks.guard.preemption import Preemption
from megatron.bridge.training.callbacks.guard.rerun import Rerun
from megatron.bridge.training.callbacks.guard.skipped_batches import SkipBatches
from megatron.bridge.training.callbacks.guard.straggler_detection import (
    NVRxStragglerDetection,
    StragglerDetection,
)
from megatron.bridge.training.callbacks.observe.first_step import FirstStepForecast
from megatron.bridge.training.callbacks.observe.logging import Logging
from megatron.bridge.training.callbacks.observe.profiling import Profiling, StopProfiling
from megatron.bridge.training.callbacks.observe.sample_generation import GenerationSamples
from megatron.bridge.training.callbacks.observe.telemetry import TelemetryOutput
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.step.embedding_noise import EmbeddingNoise


def default_callbacks(
    config: ConfigContainer, users: Iterable[Callback] = (), monitor: Callback | None = None
) -> CallbackManager:
    """The framework's callbacks around the user's, in the order in which their hooks are called."""
    hang = config.dist.hang_timeout_minutes
    nvrx = config.nvrx_straggler
    profiling = None if config.profiling is None else Profiling(config)
    rerun = config.rerun_state_machine
    noise = config.train.neftune_noise_alpha
    trains = not config.train.skip_train
    keeps_best = config.validation.patience or config.checkpoint.keep_best
    copies_to_hf = config.checkpoint.also_save_hf_checkpoint
    telemetry = None
    if config.logger.otel_service_name is not None:
        telemetry = TelemetryOutput(config)
    callbacks: list[Callback | None] = [
        telemetry,  # closed last, with all that the others have logged
        monitor,  # so that the step ends before the other callbacks run
        # these watch the hooks of all later callbacks
        None if hang is None else HangDetection(hang),
        None if config.straggler is None else StragglerDetection(config.straggler),
        None if nvrx is None or not nvrx.enabled else NVRxStragglerDetection(nvrx),
        RunLock() if trains else None,  # before anything is written to the folder
        RunMetadata(),  # the resolved config is on disk before anything can fail
        profiling,  # profiles the step alone
        GarbageCollection(),
        DataPosition(),  # before any data is read
        DataPreview(),  # before any time is spent on wrong data
        ParamGather(),  # after the last step, before anything reads the weights
        EmbeddingNoise(noise) if noise and trains else None,
        QKClip() if config.model.qk_clip else None,  # belongs to the update
        FirstStepForecast(),
        Logging(config, telemetry),  # a step is logged before it is evaluated
        profiling
        and StopProfiling(profiling),  # writing profiles does not count as time of the step
        NaNGuard(),  # a step with NaN is logged, but neither evaluated nor saved
        Evaluation(),
        BestModel() if keeps_best and trains else None,
        *GenerationSamples.of(config),
        *users,  # their changes at a step belong to the checkpoint of that step
        # on the batches as the user's callbacks see them
        None if rerun is None else Rerun(rerun, bool(config.model.fp16)),
        CheckpointSaving() if trains else None,  # before the next batch is read
        HFCopies() if copies_to_hf and trains else None,  # of what is published
        Preemption(config),  # when every rank is done with the step
        ExitInterval(),  # a run stops only after it is saved
        SkipBatches(),  # last, when all callbacks are done with the step
    ]
    return CallbackManager([callback for callback in callbacks if callback is not None])
