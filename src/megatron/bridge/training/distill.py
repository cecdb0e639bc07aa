# SPDX-License-Identifier: Apache-2.0
"""Distillation: train a student on the predictions of a teacher."""

from functools import partial
from typing import Any, cast

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.config import ConfigContainer, DistillConfig
from megatron.bridge.training.distillation.cache import CachedTargets, open_cache
from megatron.bridge.training.distillation.step import forward_step
from megatron.bridge.training.distillation.student_teacher import add_projections, bind, width
from megatron.bridge.training.distillation.teacher import identity, load_teacher, teacher_provider
from megatron.bridge.training.initialize.peft import fill_before_adding
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import AnyConfig, Callbacks, container_of, resolve_run
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError


def distill(config: AnyConfig, callbacks: Callbacks | None = None) -> Run:
    """``pretrain`` the student ``config.model`` with the loss of ``config.distill``.

    The student starts from ``checkpoint.pretrained_checkpoint``, or from random weights. The teacher runs with the
    same parallel sizes as the student, or its logits are read from ``distill.cache``. It is not trained or saved.

    Args:
        config: The configuration. An unresolved one is resolved into a copy; the original is not modified.

    Raises:
        UserError: The teacher does not exist, does not match the student or the parallel sizes, or ``pretrain``
            refuses the config.
    """
    if container_of(config).distill is None:
        raise UserError(
            "distill is not set: set distill.teacher and the weights of its losses, or use pretrain"
        )
    resolved = resolve_run(config)
    student = resolved.config
    settings = cast(DistillConfig, resolved.config.distill)
    own_callbacks: list[Callback] = []
    if settings.cache is not None:
        cache = open_cache(student)
        own_callbacks += [
            SameTeacher(cache.header.teacher, cache.header.identity),
            CachedTargets(cache),
        ]
    else:
        provider = teacher_provider(student, distributed.world_size())
        name = cast(str, settings.teacher)
        student.model.register_pre_wrap_hook(partial(_attach, provider, student))
        own_callbacks.append(SameTeacher(name, identity(name)))
    if settings.on_policy_fraction:
        # it imports the engine
        from megatron.bridge.training.distillation.on_policy import OnPolicyBatches

        own_callbacks.append(OnPolicyBatches(settings))
    return pretrain(resolved, forward_step, CallbackManager([*own_callbacks, *(callbacks or ())]))


class SameTeacher(Callback):
    """Refuses to resume with another teacher or reference, which ``key`` names, by a hash of its weights."""

    def __init__(self, name: str, identity: str, key: str = "distill.teacher") -> None:
        self._name = name
        self._identity = identity
        self._key = key

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name, "identity": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse another teacher than that of the checkpoint."""
        if state["identity"] != self._identity:
            raise UserError(
                f"this run was trained with {self._key}={state['name']}, whose weights differ from those of "
                f"{self._name}: set the same model, or another checkpoint.save"
            )


def _attach(provider: Any, config: ConfigContainer, chunks: list[MegatronModule]) -> None:
    """Attach the teacher and the projections of hidden states to the student's new ``chunks``."""
    distill = config.distill
    start = config.checkpoint.pretrained_checkpoint
    assert distill is not None, "distill is not set"
    teachers = load_teacher(provider)
    bind(chunks, teachers, distill.hidden_layers)
    widths = width(chunks[0]), width(teachers[0])
    if distill.hidden_layers and widths[0] != widths[1]:
        if start is not None:
            fill_before_adding(chunks, start, config.checkpoint.ignore_adapter)
        add_projections(chunks, distill.hidden_layers, widths, config.rng.seed)
