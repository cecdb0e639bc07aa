# SPDX-License-Identifier: Apache-2.0
"""Generation from images with Megatron-Core's engine: refused, because ``inference.llm`` does it."""

from typing import Any, NoReturn

from megatron.bridge.utils.errors import UserError

_INSTEAD = (
    "use megatron.bridge.inference.llm.LLM(path).chat(messages), whose messages may have images, or "
    "`megatron-bridge chat`; a Megatron checkpoint is a path, too"
)


def setup_model_and_tokenizer(megatron_model_path: str, **options: Any) -> NoReturn:
    """Refuse to build a model for Megatron-Core's engine."""
    raise UserError(
        f"setup_model_and_tokenizer({megatron_model_path!r}) is not supported: {_INSTEAD}"
    )


def setup_inference_wrapper(model: Any, tokenizer: Any, **options: Any) -> NoReturn:
    """Refuse to wrap a model for Megatron-Core's engine."""
    raise UserError(f"setup_inference_wrapper is not supported: {_INSTEAD}")


def generate(*args: Any, **options: Any) -> NoReturn:
    """Refuse to generate with Megatron-Core's engine."""
    raise UserError(f"inference.vlm.base.generate is not supported: {_INSTEAD}")
