# SPDX-License-Identifier: Apache-2.0
"""Run one step on this rank: a forward pass through the pipeline stages, then sampling.

The last stage gathers the logits of the rows that are needed and samples once. An all-reduce then gives the result to
all ranks, so ranks cannot disagree.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron.bridge.backends.attention.block_mask import remember_on_host
from megatron.bridge.backends.cpu import allocator
from megatron.bridge.backends.decoding.step import DecodingStep, TokenSpan
from megatron.bridge.backends.kernels import c_kernels
from megatron.bridge.inference.adapter_bank import AdapterNames
from megatron.bridge.inference.decoding_graphs import DecodingGraphs
from megatron.bridge.inference.decoding_state import DecodingState
from megatron.bridge.inference.sampling import RowOutput, choose_outputs
from megatron.bridge.inference.scheduler import StepPlan

_MANY_ROWS = 64
"""From this number of rows on, a step returns the memory of its activations, which takes 1 % of its time."""

Pixels = Callable[[Sequence[Any]], dict[str, Tensor]]
"""Convert references to images and videos to the inputs of a vision tower."""


class Runner:
    """The model of this rank in evaluation mode with its caches; ``vocabulary`` is the size without padding."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        state: DecodingState,
        vocabulary: int,
        adapters: AdapterNames,
        pixels: Pixels | None = None,
        graphs: DecodingGraphs | None = None,
    ) -> None:
        self._chunks = chunks
        self._adapters = adapters
        self._state = state
        self._vocabulary = vocabulary
        self._pixels = pixels
        config: Any = state.bare[0].config
        self._config = config
        self._hidden = (config.hidden_size, config.pipeline_dtype or config.params_dtype)
        self._split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._graphs = graphs
        self._stages: Any = parallel_state.get_pipeline_model_parallel_group()

    @torch.inference_mode()
    @c_kernels.in_use()
    def run(self, plan: StepPlan, outputs: Sequence[RowOutput], width: int) -> Tensor | None:
        """Compute the plan of this rank's lane.

        An empty plan runs one row, because other ranks' experts need this rank's collectives. ``outputs`` are in the
        order of their rows. Returns a table [outputs, width] in float64 on the rank that samples, else None.
        """
        for copy in plan.copies:
            self._state.copy(copy.source, copy.target, copy.count)
        if self._graphs is not None and self._graphs.can_run(plan):
            replayed = self._graphs.run(plan)[: len(outputs), : self._vocabulary]
            return choose_outputs(replayed, outputs, width) if is_sampling_rank() else None
        tokens, spans = self._packed(plan)
        step = DecodingStep(spans or [TokenSpan(0, 1, 0, self._state.spare, 0)], self._state.device)
        ids = torch.tensor(tokens + [0] * (step.rows - len(tokens)), device=self._state.device)[
            None
        ]
        logit_rows = [output.row for output in outputs]
        self._state.begin(step, logit_rows, plan.records_experts)
        self._adapters.begin(plan, self._state.device, logit_rows)
        logits = self._forward(ids, step, self._inputs(plan, step))
        if step.rows >= _MANY_ROWS and self._state.device.type == "cpu":
            allocator.trim()
        if logits is None or not is_sampling_rank():
            return None
        logits = logits[0, : len(outputs), : self._vocabulary]
        return choose_outputs(logits, outputs, width)

    def _packed(self, plan: StepPlan) -> tuple[list[int], list[TokenSpan]]:
        tokens: list[int] = []
        spans: list[TokenSpan] = []
        for work in plan.work:
            text = work.text
            assert text.extent is not None
            assert text.slot is not None
            tokens += work.tokens
            ahead = None
            if text.ahead is not None and work.start == 0:
                later_tokens = text.ahead + [0] * (work.count - len(text.ahead))
                ahead = remember_on_host(
                    torch.tensor([later_tokens], device=self._state.device), later_tokens
                )
            spans.append(
                TokenSpan(
                    work.row, work.count, work.start, text.extent, text.slot, text.long, ahead
                )
            )
        return tokens, spans

    def _inputs(self, plan: StepPlan, step: DecodingStep) -> dict[str, Any]:
        """Return the arguments of the model other than token ids."""
        if getattr(self._config, "vision", None) is None:
            return {"position_ids": step.positions[None], "attention_mask": None}
        rows = np.full((1, step.rows), -1)
        for work in plan.work:
            images = work.text.images
            if images is not None and work.start == 0:
                rows[0, work.row : work.row + len(images.rows)] = images.rows
        return {
            "position_ids": _three_axes(plan, step)
            if self._config.mrope_section
            else step.positions[None],
            "attention_mask": torch.zeros_like(step.positions)[None]
            if self._config.looks_ahead
            else None,
            "media": self._media(plan.images),
            "media_rows": torch.from_numpy(rows),
        }

    def _media(self, images: Any) -> dict[str, Tensor] | None:
        """Return the tensors of a prompt's images on the stage with the vision tower; sizes stay on the host."""
        if images is None or self._stages.rank() > 0:
            return None
        assert self._pixels is not None, "Engine.check has refused images"
        device = self._state.device
        dtype = self._config.params_dtype
        tensors = self._pixels(images.references)
        return {
            name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }

    def _forward(self, ids: Tensor, step: DecodingStep, inputs: dict[str, Any]) -> Tensor | None:
        """Return the logits [1, rows, vocabulary] on the last stage, and None on the others."""
        first = self._stages.rank() == 0
        last = self._stages.rank() == self._stages.size() - 1
        output: Tensor | None = None
        for index, chunk in enumerate(self._chunks):
            if not (first and index == 0):
                self._state.bare[index].set_input_tensor(self._receive(step))
            output = chunk(input_ids=ids, runtime_gather_output=True, **inputs)
            if not (last and index == len(self._chunks) - 1):
                assert output is not None
                dist.send(output.contiguous(), self._neighbor(1), group=self._stages)
                output = None
        return output

    def _receive(self, step: DecodingStep) -> Tensor:
        width, dtype = self._hidden
        hidden = torch.empty(
            step.rows // self._split, 1, width, dtype=dtype, device=self._state.device
        )
        dist.recv(hidden, self._neighbor(-1), group=self._stages)
        return hidden

    def _neighbor(self, offset: int) -> int:
        size = self._stages.size()
        return dist.get_global_rank(self._stages, (self._stages.rank() + offset) % size)


def _three_axes(plan: StepPlan, step: DecodingStep) -> Tensor:
    """Return positions [3, 1, rows] for text (equal on all axes) and prompts with images, in one transfer."""
    positions = step.positions.expand(3, 1, -1)
    work = [
        item
        for item in plan.work
        if item.text.images is not None and item.text.images.positions is not None
    ]
    if not work:
        return positions
    known = np.concatenate(
        [item.text.images.positions_of(item.start, item.count) for item in work], axis=1
    )
    places = np.concatenate([np.arange(item.row, item.row + item.count) for item in work])
    positions = positions.clone()
    positions[:, 0, torch.from_numpy(places)] = torch.from_numpy(known).to(positions)
    return positions


def is_sampling_rank() -> bool:
    """Return whether this rank of the last stage samples; context-parallel ranks have the same logits."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


class RoutedExperts:
    """Read the experts of a text's tokens, which pipeline stages and lanes store for their own layers.

    All ranks create it together. ``state`` has the caches of this rank.
    """

    def __init__(self, state: DecodingState) -> None:
        self._state = state
        layers = sorted(state.routed_experts())
        layers_of_ranks: list[list[int]] = [layers]
        if dist.is_initialized() and dist.get_world_size() > 1:
            layers_of_ranks = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(layers_of_ranks, layers)
        self.layers = sorted({layer for layers in layers_of_ranks for layer in layers})
        config: Any = state.bare[0].config
        self._topk: int = config.moe_router_topk
        self._dtype = np.uint8 if (config.num_moe_experts or 0) <= 256 else np.uint16
        # sequence-parallel ranks hold different rows, other tensor-parallel ranks the same ones
        first_tensor_rank = parallel_state.get_tensor_model_parallel_rank() == 0
        first_context_rank = parallel_state.get_context_parallel_rank() == 0
        self._is_source = first_context_rank and (config.sequence_parallel or first_tensor_rank)

    def read(self, extent: int, count: int, is_own_lane: bool) -> "np.ndarray[Any, Any]":
        """Return the experts [count, layers, topk] of the first tokens of an extent, on all ranks together."""
        experts = torch.zeros(
            count, len(self.layers), self._topk, dtype=torch.int32, device=self._state.device
        )
        if is_own_lane and self._is_source:
            for layer, cached in self._state.routed_experts().items():
                experts[:, self.layers.index(layer)] = cached[extent : extent + count].int()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(experts)
        return experts.cpu().numpy().astype(self._dtype)


def share(table: Tensor | None, rows: int, width: int, offset: int, device: torch.device) -> Tensor:
    """Return the results of all lanes [rows, width] on every rank; this rank's rows start at ``offset``."""
    all_rows = torch.zeros(rows, width, dtype=torch.float64, device=device)
    if table is not None:
        all_rows[offset : offset + len(table)] = table
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(all_rows)
    return all_rows.cpu()
