# SPDX-License-Identifier: Apache-2.0
"""Scores and embeddings of texts, from a model with a head, under any layout.

Example:
    >>> with PooledModel("classifier") as model:  # doctest: +SKIP
    ...     model.pool(["It rains."])  # scores of each class
"""

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron.bridge.inference.llm import LLM, check_sizes, parallel_sizes
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_TOKENS = 8192  # of a forward pass, padding included


@dataclass(frozen=True)
class PoolingFacts:
    """What a process needs to know of a model that other processes have loaded.

    Attributes:
        hf: The transformers tokenizer.
        max_context: Maximum tokens of a text.
        vocabulary: Tokens that have an embedding.
        head: Name of the head.
        labels: Names of the classes; empty for an embedding model.
    """

    hf: Any
    max_context: int
    vocabulary: int
    head: str
    labels: tuple[str, ...]


class PooledModel:
    """A classifier, reward model or embedding model.

    Its ranks are those of ``torchrun``, or processes that it starts, as for ``LLM``.

    Args:
        path: Hugging Face directory or hub id, or Megatron checkpoint.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        ep: Expert-parallel ranks.
        etp: Expert-tensor-parallel ranks.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None uses the dtype of the checkpoint.
        adapter: Run with adapters, one of its checkpoints, or a directory in ``peft`` format.
        tokenizer: Directory or hub id of another tokenizer.
        embed: Make embeddings with a model that has an output layer, as those are published that
            are stored as a language model.
        pooling: ``last_token`` or ``mean``, for an embedding model; None takes that of the model.
        max_context: Maximum tokens of a text; None uses the model's maximum.
        trust_remote_code: Run Python code of the model's repository.
        trust_checkpoint: Unpickle all classes in a Megatron checkpoint, which can run code.

    Raises:
        UserError: The model has no head, or its head scores single tokens.
    """

    def __init__(
        self,
        path: str,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        dtype: str | None = None,
        adapter: str | None = None,
        tokenizer: str | None = None,
        embed: bool = False,
        pooling: str | None = None,
        max_context: int | None = None,
        trust_remote_code: bool = False,
        trust_checkpoint: bool = False,
    ) -> None:
        options = {key: value for key, value in locals().items() if key not in ("self", "path")}
        self._cleanup = ExitStack()
        self._workers: Any = None
        process_count = check_sizes(tp, pp, ep, etp)
        if process_count > 1 and "RANK" not in os.environ:
            from megatron.bridge.inference.workers import Workers

            workers = Workers(process_count, PooledModel, str(path), options)
            self._workers = self._cleanup.enter_context(workers)
            (self.facts,) = self._workers.iterate("yield_facts", ())
            return
        self._load(path, options)

    def _load(self, path: str, options: Mapping[str, Any]) -> None:
        import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
        from megatron.bridge.checkpoint.model_io import unwrap
        from megatron.bridge.inference.loading import load
        from megatron.bridge.utils import unpickling

        distributed.initialize()
        names = ("dtype", "adapter", "tokenizer", "trust_remote_code")
        with unpickling.trusting(options["trust_checkpoint"]):
            model = load(
                path,
                parallel_sizes(options),
                **{name: options[name] for name in names},
                with_head=True,
                head="embedding" if options["embed"] else None,
            )
        config: Any = unwrap(model.chunks[0]).config
        if config.head is None or config.head == "token_classification":
            raise UserError(
                f"{path} has head={config.head}, which scores no texts: give a model with "
                "sequence_classification or embedding, or use LLM"
            )
        if options["pooling"] is not None and config.head != "embedding":
            raise UserError(
                f"pooling={options['pooling']!r} is for embedding models, and {path} has head={config.head}: leave it "
                "out"
            )
        if model.hf is None:
            raise UserError(f"{path} has no tokenizer: give one")
        max_context = options["max_context"] or model.max_context
        if not 1 <= max_context <= model.max_context:
            raise UserError(
                f"max_context={max_context} must be from 1 to {model.max_context}, the model's maximum"
            )
        self._chunks = model.chunks
        self._pooling = options["pooling"] or _declared_pooling(model.folder) or config.pooling
        self.facts = PoolingFacts(
            model.hf, max_context, model.vocabulary, config.head, _label_names(model, config)
        )

    def yield_facts(self) -> Iterator[PoolingFacts]:
        """Yield ``facts``, for a process that has not loaded the model."""
        yield self.facts

    def pool(self, texts: "Sequence[str | list[int]]") -> "list[Tensor]":
        """Return what the head says of each text.

        Args:
            texts: Texts, or their token ids.

        Returns:
            For each text the scores [classes] in fp32, as transformers' ``logits``; of an embedding
            model the embedding [hidden] with the Euclidean length 1.

        Raises:
            UserError: A text is empty, longer than the model's context, or has a token without an embedding.
        """
        ids = [
            self.facts.hf.encode(text) if isinstance(text, str) else list(text) for text in texts
        ]
        for index, tokens in enumerate(ids):
            check_tokens(tokens, self.facts, f"text {index}")
        return next(self.pool_ids(ids))

    def pool_ids(self, ids: list[list[int]]) -> "Iterator[list[Tensor]]":
        """Yield what the head says of each text, once."""
        if self._workers is not None:
            yield from self._workers.iterate("pool_ids", (ids,))
            return
        pooled: dict[int, Tensor] = {}
        for batch in _batches(ids):
            vectors = self._pool_batch([ids[index] for index in batch])
            pooled.update(zip(batch, vectors, strict=True))
        yield [pooled[index] for index in range(len(ids))]

    def _pool_batch(self, ids: list[list[int]]) -> "Tensor":
        """Return [texts, classes or hidden] of one forward pass."""
        import torch
        import torch.nn.functional as F

        from megatron.bridge.models.conversion.check.compare_logits import run_head

        # padding stands behind the texts, where no token of them attends to it
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(tokens) for tokens in ids], batch_first=True
        )
        values = run_head(self._chunks, padded).float()
        lengths = torch.tensor([len(tokens) for tokens in ids])
        rows = torch.arange(len(ids))
        if self.facts.head == "embedding" and self._pooling == "mean":
            inside = torch.arange(padded.size(1)) < lengths[:, None]
            values = (values * inside[:, :, None]).sum(1) / lengths[:, None]
        else:
            values = values[rows, lengths - 1]
        return F.normalize(values, dim=-1) if self.facts.head == "embedding" else values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that this object started."""
        self._cleanup.close()


def open_model(
    path: str, *, embed: bool = False, pooling: str | None = None, **options: Any
) -> LLM | PooledModel:
    """Load a model that generates, or one that pools, whichever is at ``path``.

    Args:
        path: Hugging Face directory or hub id, or Megatron checkpoint.
        embed: As for ``PooledModel``.
        pooling: As for ``PooledModel``.
        **options: Those of ``LLM``; a model that pools takes those that it has, too.
    """
    from megatron.bridge.inference.loading import HeadError

    if not embed:
        try:
            model = LLM(path, **options)
        except HeadError:
            pass
        else:
            if pooling is not None:
                raise UserError(
                    f"pooling={pooling!r} is for embeddings, and {path} generates tokens: add embed, or leave it out"
                )
            return model
    names = inspect.signature(PooledModel).parameters
    shared = {name: value for name, value in options.items() if name in names}
    return PooledModel(path, **shared, embed=embed, pooling=pooling)


def check_tokens(tokens: list[int], facts: PoolingFacts, name: str) -> None:
    """Refuse the tokens of a text that the model cannot compute; ``name`` is the text's name in messages."""
    if not tokens:
        raise UserError(f"{name} is empty: give at least one token")
    if len(tokens) > facts.max_context:
        raise UserError(
            f"{name} has {len(tokens)} tokens, more than the context of {facts.max_context}: shorten it"
        )
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < facts.vocabulary:
            raise UserError(
                f"{name}: token {token} is not in the vocabulary of {facts.vocabulary}: use the model's own tokenizer"
            )


def _batches(ids: list[list[int]]) -> Iterator[list[int]]:
    """Yield indices of texts that are computed together: those of similar lengths."""
    batch: list[int] = []
    for index in sorted(range(len(ids)), key=lambda index: len(ids[index])):
        if batch and (len(batch) + 1) * len(ids[index]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _declared_pooling(folder: Path | None) -> str | None:
    """Return the pooling that a folder of the sentence-transformers library declares, if any."""
    file = None if folder is None else folder / "1_Pooling/config.json"
    if file is None or not file.is_file():
        return None
    declared = json.loads(file.read_text())
    for key, pooling in (
        ("pooling_mode_lasttoken", "last_token"),
        ("pooling_mode_mean_tokens", "mean"),
    ):
        if declared.get(key):
            return pooling
    raise UserError(f"{file} declares another pooling than last_token and mean: choose one of them")


def _label_names(model: Any, config: Any) -> tuple[str, ...]:
    if config.head == "embedding":
        return ()
    if config.label_names is not None:
        return tuple(config.label_names)
    hf_config = getattr(model.bridge, "hf_config", None)
    id2label = getattr(hf_config, "id2label", None) or {}
    return tuple(str(id2label.get(index, f"LABEL_{index}")) for index in range(config.num_labels))
