# SPDX-License-Identifier: Apache-2.0
"""The reference: a second model, or the trained model with its adapters switched off."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.pretrained import provider_of
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.distillation.student_teacher import ChunkPair, bare_decoder, bind, set_input, width
from megatron.bridge.training.distillation.teacher import load_teacher, set_shared_settings

AttachReference = Callable[[list[MegatronModule]], None]


@dataclass
class AdaptersOff(ChunkPair):
    """A chunk that is its own reference."""

    peft: LoRA | None = None

    def run(self, model: MegatronModule, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The outputs of the chunk with and without its adapters."""
        received: Tensor | None = bare_decoder(self.student).input_tensor
        parts = (None, None) if received is None else [part.contiguous() for part in received.chunk(2, dim=-1)]
        if parts[0] is not None:
            set_input(self.student, parts[0])
        ours = model(**inputs)
        if parts[1] is not None:
            set_input(self.student, parts[1].detach())
        return ours, self._without_adapters(inputs)

    def _without_adapters(self, inputs: dict[str, Any]) -> Tensor:
        bare, training = unwrap(self.student), self.student.training
        assert self.peft is not None, "there are no adapters to switch off"
        bare.eval()  # no dropout, and no statistics of a router
        try:
            with torch.no_grad(), self.peft.disable_adapter(bare):
                return bare(**inputs)
        finally:
            bare.train(training)


def reference_of(config: ConfigContainer) -> str | None:
    """The weights of the reference; None where the trained model is its own reference."""
    assert config.dpo is not None, "dpo is not set"
    if config.dpo.reference is None and config.peft is not None:
        return None
    return config.dpo.reference or config.checkpoint.pretrained_checkpoint


def reference_provider(config: ConfigContainer, name: str, world_size: int) -> GPTModelProvider:
    """The provider of the reference with the parallel sizes of ``config.model``."""
    assert config.dpo is not None, "dpo is not set"
    provider = provider_of(name, config.dpo.trust_remote_code)
    return set_shared_settings(provider, name, config, world_size, key="dpo.reference")


def attach_model(provider: GPTModelProvider) -> AttachReference:
    """A hook that loads the reference beside the new chunks of a model."""
    return lambda chunks: bind(chunks, load_teacher(provider), {})


def attach_base(config: ConfigContainer) -> AttachReference:
    """A hook that makes each new chunk, without the adapters that it will have, its own reference."""

    def attach(chunks: list[MegatronModule]) -> None:
        for chunk in chunks:
            size, peft = width(chunk), cast(LoRA, config.peft)
            sizes = {"student": size, "teacher": size}
            chunk_info(chunk).student_teacher = AdaptersOff(
                chunk, chunk, (), {}, exchange.stage(), cast(Any, sizes), peft=peft
            )

    return attach
