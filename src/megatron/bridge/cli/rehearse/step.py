# SPDX-License-Identifier: Apache-2.0
"""The step of a rehearsed rank: the real loop over tensors without memory, and the messages that it sends."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.bridge.backends.cpu.messages import Message, recorded_messages
from megatron.bridge.cli.support.text_format import columns
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.loop import train_step
from megatron.bridge.training.setup import build_scheduler, connect
from megatron.bridge.training.state import Run
from megatron.bridge.utils.config.origins import Origins


def microbatches(config: ConfigContainer, replicas: int) -> tuple[int, int]:
    """Count the microbatches of a rehearsed and of a real step: after two per stage, the schedule repeats."""
    whole = config.train.global_batch_size // (config.train.micro_batch_size * replicas)
    return min(whole, 2 * config.model.pipeline_model_parallel_size), whole


def messages_of_step(config: ConfigContainer, model: list[Any], optimizer: Any) -> list[Message]:
    """The messages of one training step with ``config``'s batch, in their order."""
    connect(model, optimizer, config.ddp, config.dist.align_grad_reduce)
    run = Run(
        config=config,
        origins=Origins({}),
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        tokenizer=None,
        forward_step=forward_step,
        callbacks=CallbackManager([]),
        train_batches=[itertools.repeat(_batch(config)) for _ in model],
    )
    experts = config.model.num_moe_experts
    with recorded_messages((config.model.moe_router_topk or 1) / experts if experts else 1.0) as found:
        train_step(run)
    return found


def _batch(config: ConfigContainer) -> dict[str, Any]:
    """A microbatch on the host."""
    shape = config.train.micro_batch_size, config.dataset.seq_length
    tokens, mask = torch.zeros(shape, dtype=torch.long, device="cpu"), torch.ones(shape, device="cpu")
    return {"tokens": tokens, "labels": tokens, "position_ids": tokens, "loss_mask": mask, "attention_mask": None}


def message_table(messages: Sequence[Message]) -> Iterator[str]:
    """Messages by kind and group, those with the most bytes first."""
    kinds: dict[tuple[str, str, int], list[int]] = {}
    for each in messages:
        kinds.setdefault((each.kind, each.group, each.ranks), []).append(each.bytes)
    rows = [("times", "MB each", "GB", "ranks", "messages")]
    for (kind, group, ranks), sizes in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        low, high = f"{min(sizes) / 1e6:.3g}", f"{max(sizes) / 1e6:.3g}"
        span = low if low == high else f"{low} to {high}"
        name = group.lower().removesuffix("_group").replace("_", " ")
        rows.append((f"{len(sizes):,}", span, f"{sum(sizes) / 1e9:.3g}", str(ranks), f"{kind}, {name}"))
    yield from columns(rows)
