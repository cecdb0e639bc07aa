# SPDX-License-Identifier: Apache-2.0
"""The forward step of a model with a head: classification, rewards, and contrastive training of embeddings."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.dpo import answer_of_token, sum_by_answer, sum_of_pairs
from megatron.bridge.training.gpt_step import next_batch
from megatron.bridge.training.state import BatchIterator, LossFunction
from megatron.bridge.training.step.losses import LossReport

Loss = tuple[Tensor, Tensor, LossReport]


def forward_step(
    data_iterator: BatchIterator, model: MegatronModule
) -> tuple[Tensor, LossFunction]:
    """Run one model chunk on the next microbatch: its output, and the function that computes the loss from it.

    On the last stage the output is what the head makes of each token, [micro_batch_size, sequence of this
    context-parallel rank, classes or hidden size]; the loss is ``classification_loss``, of an embedding model
    ``contrastive_loss``, and with one label ``reward_loss``, or for data of rerankers ``relevance_loss`` or
    ``ranking_loss``.
    """
    batch = next_batch(data_iterator)
    config = get_model_config(model)
    assert isinstance(config, GPTModelProvider), "the model was not built by a provider"
    return model(**model_inputs(batch, model)), partial(_loss_of(config, batch), batch)


forward_step.has_losses_of_heads = True  # type: ignore[attr-defined]


def _loss_of(config: GPTModelProvider, batch: dict[str, Any]) -> Any:
    if config.head == "embedding":
        return partial(contrastive_loss, config)
    if config.num_labels != 1:
        return classification_loss
    if "relevance" in batch:
        return relevance_loss
    return partial(ranking_loss, config) if config.hard_negatives else reward_loss


def classification_loss(batch: dict[str, Any], scores: Tensor) -> Loss:
    """Cross-entropy of the class at each position in the loss, as transformers' classification models have it.

    ``labels`` and ``loss_mask`` are [batch, sequence], labels outside of the mask are not read; ``scores`` [batch,
    sequence, classes].
    """
    mask = batch["loss_mask"].view(-1) > 0
    labels = batch["labels"].view(-1)[mask]
    chosen = scores.flatten(0, 1)[mask].float()
    losses = F.cross_entropy(chosen, labels, reduction="none")
    count = mask.sum()
    right = (chosen.argmax(-1) == labels).sum()
    sums = {"classification loss": losses.detach().sum(), "accuracy": right}
    report = {name: torch.stack((value.double(), count.double())) for name, value in sums.items()}
    # 0 times the sum: a rank without a position in the loss still takes part in the backward pass
    return losses.sum() + 0.0 * scores.sum(), count.to(torch.int), report


def reward_loss(batch: dict[str, Any], scores: Tensor) -> Loss:
    """``-log sigmoid(chosen - rejected)`` of the scores of the last tokens (https://arxiv.org/abs/2203.02155).

    ``batch`` has rows of ``PairRows``; ``scores`` are [1, tokens of this context-parallel rank, 1].
    """
    scores_at_end = last_token(batch, scores)[:, 0]
    chosen = scores_at_end[0::2]
    rejected = scores_at_end[1::2]
    losses = -F.logsigmoid(chosen - rejected)
    return sum_of_pairs(
        losses,
        {
            "reward loss": losses,
            "chosen reward": chosen,
            "rejected reward": rejected,
            "reward accuracy": (chosen > rejected).float(),
        },
    )


def relevance_loss(batch: dict[str, Any], scores: Tensor) -> Loss:
    """Binary cross-entropy of the score of each query with a document.

    ``batch`` has rows of ``RelevanceRows``; ``scores`` are [1, tokens of this context-parallel rank, 1].
    """
    scores_at_end = last_token(batch, scores)[:, 0]
    mask = batch["loss_mask"].view(-1).float()
    labels = sum_by_answer(batch, batch["relevance"].view(-1).float() * mask)
    losses = F.binary_cross_entropy_with_logits(scores_at_end, labels, reduction="none")
    is_right = ((scores_at_end > 0) == (labels > 0.5)).float()
    return sum_of_pairs(losses, {"relevance loss": losses, "relevance accuracy": is_right})


def ranking_loss(config: GPTModelProvider, batch: dict[str, Any], scores: Tensor) -> Loss:
    """Cross-entropy of finding the document that fits among those of its query, by their scores.

    ``batch`` has rows of ``PairRows``, the document that fits first; ``scores`` are [1, tokens of this
    context-parallel rank, 1].
    """
    by_query = last_token(batch, scores).view(-1, 1 + config.hard_negatives)
    targets = torch.zeros(len(by_query), dtype=torch.long, device=by_query.device)
    losses = F.cross_entropy(by_query, targets, reduction="none")
    is_first = (by_query.argmax(-1) == targets).float()
    return sum_of_pairs(losses, {"ranking loss": losses, "ranking accuracy": is_first})


def contrastive_loss(config: GPTModelProvider, batch: dict[str, Any], states: Tensor) -> Loss:
    """Cross-entropy of finding a query's text among all of the microbatch, by cosine (InfoNCE).

    See https://arxiv.org/abs/1807.03748. With ``gather_negatives``, the texts are those of all data-parallel ranks;
    with ``matryoshka_dims``, the losses of the first dimensions are added (https://arxiv.org/abs/2205.13147).
    ``batch`` has rows of ``PairRows``; ``states`` are [1, tokens of this context-parallel rank, hidden size].
    """
    pooled = (
        last_token(batch, states)
        if config.pooling == "last_token"
        else mean_of_tokens(batch, states)
    )
    texts_of_row = pooled.view(-1, 2 + config.hard_negatives, pooled.shape[-1])
    queries = texts_of_row[:, 0]
    texts = texts_of_row[:, 1:]
    first = 0  # the number of the first text that fits a query of this rank
    replicas: Any = parallel_state.get_data_parallel_group()
    if config.gather_negatives and replicas.size() > 1:
        first = replicas.rank() * len(queries)
        texts = gather_from_sequence_parallel_region(texts.contiguous(), group=replicas)
    # all texts that fit, then all that do not
    texts = texts.transpose(0, 1).flatten(0, 1)
    targets = torch.arange(first, first + len(queries), device=texts.device)
    dims = config.matryoshka_dims or [pooled.shape[-1]]
    weights = config.matryoshka_weights or [1.0] * len(dims)
    total = torch.zeros(len(queries), device=texts.device)
    report: LossReport = {}
    for size, weight in zip(dims, weights, strict=True):
        from_queries = F.normalize(queries[:, :size], dim=-1)
        from_texts = F.normalize(texts[:, :size], dim=-1)
        similarities = from_queries @ from_texts.T / config.contrastive_temperature
        losses = F.cross_entropy(similarities, targets, reduction="none")
        total = total + weight * losses
        suffix = f" of {size}" if config.matryoshka_dims else ""
        report[f"retrieval accuracy{suffix}"] = (similarities.argmax(-1) == targets).float()
    return sum_of_pairs(total, {"contrastive loss": total, **report})


def last_token(batch: dict[str, Any], values: Tensor) -> Tensor:
    """What ``values`` [1, tokens, n] says of the last token of each text, [texts, n]; equal on all CP ranks."""
    mask = batch["loss_mask"].view(-1, 1).float()
    return sum_by_answer(batch, values.flatten(0, 1).float() * mask)


def mean_of_tokens(batch: dict[str, Any], values: Tensor) -> Tensor:
    """The mean of ``values`` [1, tokens, n] over the tokens of each text, [texts, n], without its padding."""
    positions = batch["position_ids"].view(-1).float()
    mask = batch["loss_mask"].view(-1).float()
    last = sum_by_answer(batch, positions * mask)
    inside = (positions <= last[answer_of_token(batch)]).float()
    sums = sum_by_answer(batch, values.flatten(0, 1).float() * inside[:, None])
    return sums / (last + 1)[:, None]
