# SPDX-License-Identifier: Apache-2.0
"""Classes of Qwen3-VL by which other programs recognize, and patch, another implementation of it."""

from typing import Any, NoReturn

from megatron.bridge.models.vision.model import VisionGPTModel
from megatron.bridge.utils.errors import UserError

Qwen3VLGPTModel = VisionGPTModel


class _OfOtherModels:
    """A class of which no model has an instance; patches of its methods change nothing here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.forward()

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            f"{type(self).__name__} is not used: models are built by a provider, such as "
            "AutoBridge.from_hf_pretrained(path).to_megatron_provider()"
        )


class Qwen3VLTextRotaryEmbedding(_OfOtherModels):
    """Positions on three axes come from ``models.features.rope``."""


class Qwen3VLMoETextRotaryEmbedding(_OfOtherModels):
    """The same for mixtures of experts."""


class Qwen3VLSelfAttention(_OfOtherModels):
    """Attention is Megatron-Core's ``SelfAttention``."""
