# SPDX-License-Identifier: Apache-2.0
"""Train a student on what a teacher says of each token."""

import copy
from typing import Any, cast

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.data.tokenizer import build_tokenizer
from megatron.bridge.training.adapters import fill_before_adding
from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.distillation.cache import CachedTargets, open_cache
from megatron.bridge.training.distillation.pair import bind, width
from megatron.bridge.training.distillation.projections import add_projections
from megatron.bridge.training.distillation.step import forward_step
from megatron.bridge.training.distillation.teacher import identity, load_teacher, teacher_provider
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import Callbacks
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.errors import UserError


def distill(config: ConfigContainer, callbacks: Callbacks | None = None) -> Run:
    """``pretrain`` the student ``config.model`` with the loss that ``config.distill`` describes.

    The student starts from ``checkpoint.pretrained_checkpoint``, or from random weights. The teacher runs beside
    it in the same layout, or its logits come from ``distill.cache``. It is neither trained nor saved.

    Args:
        config: What to run.
        callbacks: Callbacks of your own.

    Returns:
        The finished run.

    Raises:
        UserError: there is no such teacher, it does not fit the student or the layout, or whatever ``pretrain``
            refuses.
    """
    checked = checked_config(config)
    assert checked.distill is not None, "checked"
    mine: list[Callback] = []
    if checked.distill.cache is not None:
        cache = open_cache(checked)
        mine += [SameTeacher(cache.header.teacher, cache.header.identity), CachedTargets(cache)]
    else:
        provider, name = teacher_provider(checked, dist.world_size()), cast(str, checked.distill.teacher)
        config.model.register_pre_wrap_hook(_attach(provider, checked))
        mine.append(SameTeacher(name, identity(name)))
    return pretrain(config, forward_step, CallbackManager([*mine, *(callbacks or ())]))


def checked_config(config: ConfigContainer) -> ConfigContainer:
    """A resolved copy of a config that distills.

    Raises:
        UserError: it does not, or something in it cannot be.
    """
    if config.distill is None:
        raise UserError("distill is not set: set distill.teacher and what to learn from it, or use pretrain")
    checked = copy.deepcopy(config)
    if checked.model.vocab_size is None:
        checked.model.vocab_size = build_tokenizer(checked.tokenizer).vocab_size
    checked.validate()
    return checked


class SameTeacher(Callback):
    """Keeps a run from going on with another teacher."""

    def __init__(self, name: str, identity: str) -> None:
        self._name = name
        self._identity = identity

    def state_dict(self) -> dict[str, Any]:
        """Which one it is."""
        return {"name": self._name, "identity": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse another one.

        Raises:
            UserError: naming both.
        """
        if state["identity"] != self._identity:
            raise UserError(
                f"this run learnt from distill.teacher={state['name']}, whose weights are not those of "
                f"{self._name}: set the same teacher, or another checkpoint.save"
            )


def _attach(provider: Any, config: ConfigContainer) -> Any:
    """What puts the teacher, and the maps between hidden states, beside the student's new chunks."""
    distill, start = config.distill, config.checkpoint.pretrained_checkpoint
    assert distill is not None, "asked for a run that distills"

    def attach(chunks: list[MegatronModule]) -> None:
        teachers = load_teacher(provider)
        bind(chunks, teachers, distill.hidden_layers)
        widths = width(chunks[0]), width(teachers[0])
        if distill.hidden_layers and widths[0] != widths[1]:
            if start is not None:
                fill_before_adding(chunks, start)
            add_projections(chunks, distill.hidden_layers, widths, config.rng.seed)

    return attach
