# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization: train a model to prefer one of two answers."""

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.observe.report import FinetuningReport
from megatron.bridge.training.distill import SameTeacher
from megatron.bridge.training.distillation.teacher import identity
from megatron.bridge.training.finetune import check_tokenizer
from megatron.bridge.training.preference import (
    attach_base,
    attach_model,
    forward_step,
    reference_of,
    reference_provider,
)
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import AnyConfig, Callbacks, container_of, resolve_run
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError


def dpo(config: AnyConfig, callbacks: Callbacks | None = None) -> Run:
    """``pretrain`` from ``checkpoint.pretrained_checkpoint`` with the loss of ``config.dpo``, or resume.

    The reference runs with the same parallel sizes as the model. It is not trained or saved.

    An unresolved config is resolved into a copy.
    """
    given = container_of(config)
    if given.dpo is None:
        raise UserError("dpo is not set: set it to a DPOConfig, or use finetune")
    if given.checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.pretrained_checkpoint is not set: preference tuning starts from a fine-tuned model, a "
            "Megatron checkpoint or a Hugging Face directory"
        )
    check_tokenizer(given)
    resolved = resolve_run(config)
    name, mine = reference_of(resolved.config), list[Callback]()
    if name is None:
        attach = attach_base(resolved.config)
    else:
        attach = attach_model(reference_provider(resolved.config, name, distributed.world_size()))
        mine.append(SameTeacher(name, identity(name), key="dpo.reference"))
    resolved.config.model.register_pre_wrap_hook(attach)
    return pretrain(resolved, forward_step, CallbackManager([*mine, *(callbacks or ()), FinetuningReport()]))
