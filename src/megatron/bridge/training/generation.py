# SPDX-License-Identifier: Apache-2.0
"""The package's engine on the weights that are trained.

The engine runs in the same processes and layout as the training and reads its weights, so nothing is copied. All ranks
call the same functions; each data-parallel rank computes its share, and every rank gets all results.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.data.records.end_tokens import end_of_turn, end_tokens
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.state import Run


def derive_seed(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on the numbers and their order alone."""
    position = ":".join(map(str, numbers))
    digest = hashlib.blake2b(position.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class GenerationLimits(Protocol):
    """The settings that bound the memory of generation."""

    kv_memory: int
    """Bytes for the caches on each rank."""
    max_requests: int
    """Completions that a data-parallel rank generates at the same time."""


@contextmanager
def open_engine(run: Run, limits: GenerationLimits) -> Iterator[Engine]:
    """An engine on the weights of the run, which are as they were behind it."""
    with (
        gathered_params(run.model),
        evaluation_mode(run.model),
        Engine(run.model, engine_config(run, limits), transformers_tokenizer(run)) as engine,
    ):
        yield engine


def engine_config(run: Run, limits: GenerationLimits) -> EngineConfig:
    """The limits of generation.

    Weights are not packed on CPUs: that replaces their memory, which is a part of the buffers of the optimizer.
    """
    vocabulary = run.config.model.vocab_size
    assert vocabulary is not None, "a run has resolved the vocabulary"
    return EngineConfig(
        max_context=run.config.dataset.seq_length,
        vocabulary=vocabulary,  # that of the loss, which may be larger than the tokenizer's
        ends=end_ids(run.config, run.tokenizer),
        kv_memory=limits.kv_memory,
        max_requests=limits.max_requests,
    )


def end_ids(config: ConfigContainer, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a completion, as in chats with the finished model."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return frozenset({tokenizer.eod})
    folder = Path(tokenizer.path)
    template = template_text(getattr(config.dataset, "chat_template", None))
    ends = end_tokens(tokenizer.hf, folder if folder.is_dir() else None)
    return ends | {tokenizer.eod} | end_of_turn(tokenizer.hf, template)


def transformers_tokenizer(run: Run) -> Any:
    """The tokenizer of transformers; None if the run has another one."""
    return run.tokenizer.hf if isinstance(run.tokenizer, HuggingFaceTokenizer) else None
