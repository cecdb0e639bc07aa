# SPDX-License-Identifier: Apache-2.0
"""Compute a training forward pass with the engine's numbers, so that log-probabilities equal those of rollouts bitwise.

The engine and a training step run the same layers, but not the same kernels: the engine multiplies with packed weights
in rows that do not depend on the batch, attends to caches chunk by chunk and token by token, has C kernels for norms
and gates, and takes log-probabilities from complete rows of logits. Sums in another order round differently.

Here each chunk runs twice. First it runs as in the engine, without gradients: the same steps of the same texts, with
caches that live as long as the pass. Then it runs as always, but each layer returns the values of the first pass, and
routers choose the experts of the first pass. So all values are the engine's, and the backward pass is that of training
at these values.
"""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.attention.block_mask import packed_segments
from megatron.bridge.backends.decoding.step import DecodingStep, TokenSpan
from megatron.bridge.backends.kernels import c_kernels
from megatron.bridge.backends.moe.router_replay import ExpertReplay
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference import decoding_state
from megatron.bridge.inference.decoding_state import Changes, DecodingState, PackedModule
from megatron.bridge.inference.sampling import token_logprobs
from megatron.bridge.inference.scheduler import rounded
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.utils.errors import UserError


class RolloutNumerics(AbstractContextManager["RolloutNumerics"]):
    """Forward passes of training whose values are bitwise those of the engine, for the steps of one set of weights.

    Create it on all ranks together, and enter it anew after each change of the weights. The options are those of the
    engine that generated the texts. Losses that a chunk returns for ``labels`` are then bitwise the negative
    ``Completion.logprobs``; without ``labels``, it returns the engine's logits.

    Args:
        chunks: this rank's chunks of the model that trains.
        vocabulary: ``EngineConfig.vocabulary``.
        pack: ``EngineConfig.pack``, which is true for ``LLM``.
        chunk: the smaller one of ``EngineConfig.chunk`` and ``EngineConfig.rows``.

    Example:
        >>> with RolloutNumerics(model, vocabulary=32000) as numerics:  # doctest: +SKIP
        ...     with numerics.microbatch(prompt_lengths):
        ...         losses = model[0](tokens, positions, None, labels=labels, packed_seq_params=packed)
        ...     losses.sum().backward()
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        *,
        vocabulary: int,
        pack: bool = False,
        chunk: int = 256,
    ) -> None:
        self.vocabulary = vocabulary
        self.chunk = chunk
        self._pack = pack
        self._bare: list[Any] = [unwrap(model_chunk) for model_chunk in chunks]
        _check_model(self._bare)
        self.replay = ExpertReplay(self._bare)
        self._passes = [_ChunkPasses(bare, self) for bare in self._bare]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.replay)
            for bare, passes in zip(self._bare, self._passes, strict=True):
                packed = list(decoding_state.pack_layers([bare])) if self._pack else []
                stack.enter_context(passes.attached(packed))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextmanager
    def microbatch(self, prompt_lengths: Sequence[int], experts: Any = None) -> Iterator[None]:
        """Compute the forward passes inside the context with the engine's numbers; others are as always.

        Args:
            prompt_lengths: tokens of the prompt of each sequence of ``packed_seq_params``, in the order of the row. The
                engine computes prompts in chunks, and the tokens after them one by one.
            experts: experts [rows, layers, topk] to choose, as ``ExpertReplay.microbatch`` takes them; None leaves the
                choice to the routers, which choose those of the rollout as long as weights are the same.
        """
        for passes in self._passes:
            passes.begin(list(prompt_lengths), experts)
        try:
            yield
        finally:
            for passes in self._passes:
                passes.end()


@dataclass
class _Outputs:
    """What the first pass computed, without padding."""

    layers: dict[int, Tensor]  # outputs by the index of the module
    logits: Tensor | None  # [1, rows, vocabulary], on the last stage
    experts: Tensor | None  # [rows, layers of the model, topk]


@dataclass
class _Values:
    """The engine's outputs of one layer."""

    current: Tensor | None = None
    recomputed: deque[Tensor] = field(default_factory=deque)


class _ChunkPasses:
    """The two passes of one chunk, in the place of its ``forward``."""

    def __init__(self, bare: Any, numerics: RolloutNumerics) -> None:
        self._bare = bare
        self._numerics = numerics
        self._forward = bare.forward
        self._signature = inspect.signature(bare.forward)
        self._core_loss = getattr(bare, "compute_language_model_loss", None)
        self._layers = _layers_of(bare)
        self._values = [_Values() for _ in self._layers]
        self._captured: dict[int, Tensor] | None = None  # during the first pass
        self._packed: list[PackedModule] = []
        self._prompts: list[int] | None = None
        self._experts: Any = None
        self._is_recorded_by_autograd = False
        self._loss: tuple[Tensor, Tensor] | None = None  # labels, losses

    @contextmanager
    def attached(self, packed: list[PackedModule]) -> Iterator[None]:
        """Replace the forward pass of the chunk inside the context."""
        self._packed = packed
        with Changes() as changes:
            changes.set(self._bare, "forward", self._run)
            if self._core_loss is not None:
                changes.set(self._bare, "compute_language_model_loss", self._compute_loss)
            for index, layer in enumerate(self._layers):
                hook = _LayerHook(self, index)
                changes.callback(layer.register_forward_hook(hook).remove)
            yield
        self._packed = []

    def begin(self, prompts: list[int], experts: Any) -> None:
        self._prompts = prompts
        self._experts = experts
        self._is_recorded_by_autograd = torch.is_grad_enabled()

    def end(self) -> None:
        self._prompts = None
        self._experts = None
        self._loss = None
        for values in self._values:
            values.current = None

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute both passes, or only the usual one outside of a microbatch."""
        if self._prompts is None:
            return self._forward(*args, **kwargs)
        inputs = self._signature.bind(*args, **kwargs).arguments
        outputs = self._run_as_engine(inputs, self._prompts)
        for index, values in enumerate(self._values):
            values.current = outputs.layers[index]
        labels = inputs.get("labels")
        if labels is not None and outputs.logits is not None:
            self._loss = labels, self._losses(outputs.logits, labels)
        with self._replayed(outputs.experts):
            result = self._forward(*args, **kwargs)
        if labels is None and outputs.logits is not None:
            return with_values(result, self._logits_of_rank(outputs.logits, result))
        return result

    @contextmanager
    def _replayed(self, experts: Tensor | None) -> Iterator[None]:
        if experts is None:
            yield
            return
        with self._numerics.replay.microbatch(experts):
            yield

    def _run_as_engine(self, inputs: dict[str, Any], prompts: list[int]) -> _Outputs:
        ids = inputs["input_ids"]
        rows = ids.size(1)
        bounds = _bounds(inputs.get("packed_seq_params"), rows)
        step, tokens = plan_step(bounds, prompts, rows, self._numerics.chunk, ids.device)
        self._check_rows(ids, step.rows)
        with torch.inference_mode(), c_kernels.in_use(), evaluation_mode([self._bare]):
            state = DecodingState([self._bare], tokens, len(bounds))
            padded = ids.new_zeros(1, step.rows)
            padded[:, :rows] = ids
            with state.attached(), Changes() as changes, self._capturing() as layers:
                for packed in self._packed:
                    changes.set(packed.module, packed.name, packed.value)
                state.begin(step, range(rows), records_experts=True)
                self._set_experts(state, step.rows)
                with self._padded_input(step.rows):
                    result = self._forward(
                        input_ids=padded,
                        position_ids=step.positions[None],
                        attention_mask=None,
                        runtime_gather_output=True,
                    )
                logits = result[:, :rows] if self._bare.post_process else None
        experts = self._experts_of_rows(state, step, rows)
        count = len(next(iter(layers.values()))) - (step.rows - rows) if layers else rows
        outputs = {index: output[:count] for index, output in layers.items()}
        return _Outputs(outputs, logits, experts)

    @contextmanager
    def _capturing(self) -> Iterator[dict[int, Tensor]]:
        self._captured = {}
        try:
            yield self._captured
        finally:
            self._captured = None

    @contextmanager
    def _padded_input(self, rows: int) -> Iterator[None]:
        """Pad the hidden states that a later pipeline stage has received to ``rows``."""
        decoder = self._bare.decoder
        received = None if self._bare.pre_process else decoder.input_tensor
        if received is None:
            yield
            return
        missing = rows - len(received)
        if not self._bare.config.sequence_parallel and missing:
            zeros = received.new_zeros(missing, *received.shape[1:])
            self._bare.set_input_tensor(torch.cat((received, zeros)))
        try:
            yield
        finally:
            self._bare.set_input_tensor(received)

    def _set_experts(self, state: DecodingState, rows: int) -> None:
        if self._experts is None:
            return
        experts = torch.as_tensor(self._experts).long()
        missing = rows - len(experts)
        experts = nn.functional.pad(experts, (0, 0, 0, 0, 0, missing), value=-1)
        state.choose_experts(experts, self._numerics.replay.layers)

    def _experts_of_rows(self, state: DecodingState, step: DecodingStep, rows: int) -> Any:
        """Return the experts [rows, layers, topk] that the first pass chose; layers of other stages are negative."""
        cached = state.routed_experts()
        layers = self._numerics.replay.layers
        if not cached:
            return None
        topk = next(iter(cached.values())).size(-1)
        experts = torch.full((rows, len(layers), topk), -1)
        for layer, stored in cached.items():
            experts[: step.tokens, layers.index(layer)] = stored[step.places].long().cpu()
        return experts

    def _check_rows(self, ids: Tensor, rows: int) -> None:
        config = self._bare.config
        if len(ids) != 1:
            raise UserError(
                f"a microbatch of {list(ids.shape)} tokens cannot have the engine's numbers: pack its sequences into "
                "one row"
            )
        if config.sequence_parallel and rows != ids.size(1):
            raise UserError(
                f"a packed row of {ids.size(1)} tokens cannot have the engine's numbers under sequence parallelism: "
                f"pad it to a multiple of 8"
            )

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-probabilities [1, rows] of ``labels``; zeros for labels outside the vocabulary."""
        size = self._numerics.vocabulary
        is_token = (labels >= 0) & (labels < size)
        targets = torch.where(is_token, labels, 0).flatten()
        logprobs = token_logprobs(logits[0, :, :size], targets)
        return -logprobs.view_as(labels) * is_token

    def _logits_of_rank(self, logits: Tensor, result: Tensor) -> Tensor:
        """Return the part of the logits that this rank's output layer returns."""
        size = result.size(-1)
        if size == logits.size(-1):
            return logits
        first = size * self._bare.output_layer.tp_group.rank()
        return logits[..., first : first + size]

    def _compute_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        assert self._core_loss is not None
        losses = self._core_loss(labels, logits)
        if self._loss is None or labels is not self._loss[0]:  # those of multi-token prediction
            return losses
        return with_values(losses, self._loss[1])

    def take_output(self, index: int, output: Any) -> Any:
        """Keep the output of a layer in the first pass, and return this output in the second one."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self._captured is not None:
            self._captured[index] = hidden
            return output
        values = self._values[index]
        engine_output = values.current
        if engine_output is not None:
            if self._is_recorded_by_autograd and not torch.is_grad_enabled():  # a checkpoint
                values.recomputed.append(engine_output)
        elif values.recomputed and torch.is_grad_enabled():
            # backward passes have the order of forward passes
            engine_output = values.recomputed.popleft()
        if engine_output is None:
            return output
        hidden = with_values(hidden, engine_output)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


class _LayerHook:
    """A forward hook of one layer of a chunk."""

    def __init__(self, passes: _ChunkPasses, index: int) -> None:
        self._passes = passes
        self._index = index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._passes.take_output(self._index, output)


class _Substitute(torch.autograd.Function):
    """Returns other values for a tensor; the gradient is that of the tensor."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, values: Tensor) -> Tensor:
        if computed.shape != values.shape:
            raise RuntimeError(f"the engine computed {values.shape}, training {computed.shape}")
        return values.to(computed.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def with_values(computed: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` with the gradient of ``computed``; both have one shape."""
    output = _Substitute.apply(computed, values)
    assert isinstance(output, Tensor)
    return output


def plan_step(
    bounds: Sequence[tuple[int, int]],
    prompt_lengths: Sequence[int],
    rows: int,
    chunk: int,
    device: torch.device,
) -> tuple[DecodingStep, int]:
    """Return one step of the engine for all tokens of a packed row, and the tokens that its caches need.

    Args:
        bounds: first row of each sequence, and the row after its last one, with padding.
        prompt_lengths: tokens of the prompt of each sequence.
        rows: rows of the microbatch.
        chunk: tokens of a prompt that the engine computes together.
        device: the device of the caches.
    """
    if len(prompt_lengths) != len(bounds):
        raise UserError(
            f"{len(prompt_lengths)} prompt lengths for {len(bounds)} sequences of a packed row: give one for each"
        )
    texts = [
        (start, stop, min(prompt, stop - start))
        for (start, stop), prompt in zip(bounds, prompt_lengths, strict=True)
    ]
    last_row = bounds[-1][1] if bounds else 0
    if last_row < rows:  # padding after the last sequence
        texts.append((last_row, rows, rows - last_row))
    spans: list[TokenSpan] = []
    extent = 0
    for slot, (start, stop, prompt) in enumerate(texts):
        length = stop - start
        cuts = [*range(0, prompt, chunk), *range(prompt, length), length]
        for first, end in pairwise(cuts):
            spans.append(TokenSpan(start + first, end - first, first, extent, slot))
        extent += rounded(length)
    return DecodingStep(spans, device), extent


def _bounds(packed: Any, rows: int) -> list[tuple[int, int]]:
    if packed is None:
        return [(0, rows)]
    segments, _ = packed_segments(packed)
    return [(segment.start, segment.start + segment.padded) for segment in segments]


def _layers_of(bare: Any) -> list[nn.Module]:
    """Return the modules whose outputs are hidden states: the layers of the decoder and the norm after them."""
    decoder = bare.decoder
    norms = [getattr(decoder, name, None) for name in ("final_layernorm", "final_norm")]
    return [*decoder.layers, *(norm for norm in norms if norm is not None)]


def _check_model(chunks: Sequence[Any]) -> None:
    decoding_state.check_layers(chunks)
    config = chunks[0].config
    problems = {
        "context_parallel_size": config.context_parallel_size > 1,
        "hidden_dropout": config.hidden_dropout > 0,
        "attention_dropout": config.attention_dropout > 0,
        "vision": getattr(config, "vision", None) is not None,
        "fp8": bool(config.fp8),
    }
    for name, is_set in problems.items():
        if is_set:
            raise UserError(
                f"a forward pass with the engine's numbers does not work with {name}={getattr(config, name)}: "
                "leave it out, or compare log-probabilities with a tolerance"
            )
    if any(isinstance(weight, DTensor) for chunk in chunks for weight in chunk.parameters()):
        raise UserError(
            "a forward pass with the engine's numbers does not work with fully sharded weights: use the distributed "
            "optimizer, or compare log-probabilities with a tolerance"
        )
    if decoding_state.switch_length(chunks) is not None:
        raise UserError(
            "a forward pass with the engine's numbers does not work with longrope, whose frequencies depend on the "
            "length of the text: compare log-probabilities with a tolerance"
        )
