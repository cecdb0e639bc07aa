# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Compare two models: their logits, the position with the largest difference, and the layer outputs."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.plan import global_name

EMBEDDING = "embedding"


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of a model: logits [rows, sequence, vocabulary], and hidden states by layer name."""

    logits: Tensor
    hidden: dict[str, Tensor]


@dataclass(frozen=True)
class LogitComparison:
    """The differences of two models."""

    largest: float  # largest absolute difference of two logits
    scale: float  # standard deviation of the reference logits
    worst: tuple[int, int, int]  # (row, position, token) of the largest difference
    pair: tuple[float, float]  # the two logits there, reference first
    cosine: float  # smallest cosine similarity of the logits at a position
    same_choice: float  # fraction of positions with the same most likely token
    # layer -> largest absolute difference of its output relative to the reference's standard deviation
    layers: dict[str, float]

    @property
    def relative(self) -> float:
        """The largest difference relative to the standard deviation of the logits."""
        return self.largest / self.scale


def compare(reference: ModelOutputs, outputs: ModelOutputs) -> LogitComparison:
    """Compare ``outputs`` with ``reference``, without the padding of the vocabulary."""
    expected = reference.logits.float()
    logits = outputs.logits.float()[..., : expected.shape[-1]]
    difference = (logits - expected).abs()
    row, position, token = (
        int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)
    )
    return LogitComparison(
        largest=float(difference.max()),
        scale=float(expected.std()),
        worst=(row, position, token),
        pair=(float(expected[row, position, token]), float(logits[row, position, token])),
        cosine=float(torch.cosine_similarity(expected, logits, dim=-1).min()),
        same_choice=float((expected.argmax(-1) == logits.argmax(-1)).float().mean()),
        layers={
            name: float(
                (outputs.hidden[name].float() - state.float()).abs().max() / state.float().std()
            )
            for name, state in reference.hidden.items()
            if name in outputs.hidden
        },
    )


@torch.no_grad()
def run_hf(model: Any, ids: Tensor, **extra: Any) -> ModelOutputs:
    """Run a transformers model on token ids [rows, sequence]; ``extra`` has other inputs, such as images."""
    # the outermost ModuleList; its name depends on the architecture
    layers = next(
        module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)
    )
    hidden: dict[str, Tensor] = {}

    def keep_embedding(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hidden[EMBEDDING] = inputs[0].cpu()

    named = {f"layer {index}": layer for index, layer in enumerate(layers)}
    # the input of the first layer: some models scale the embedding's output
    with layers[0].register_forward_pre_hook(keep_embedding), _recorded_outputs(named, hidden):
        logits = model(input_ids=ids, use_cache=False, **extra).logits
    return ModelOutputs(logits.cpu(), hidden)


@torch.no_grad()
def run_megatron(chunks: Sequence[nn.Module], ids: Tensor, **extra: Any) -> ModelOutputs:
    """Run this rank's chunks on token ids [rows, sequence]; return the outputs of the full model on all ranks."""
    hidden: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {}
    for chunk in map(unwrap, chunks):
        if getattr(chunk, "pre_process", False):
            modules[EMBEDDING] = chunk.get_submodule("embedding")
        for index, layer in enumerate(chunk.get_submodule("decoder.layers").children()):
            layer_index = global_name(chunk, f"decoder.layers.{index}.").split(".")[2]
            modules[f"layer {layer_index}"] = layer
    with _recorded_outputs(modules, hidden):
        logits = _run_pipeline(chunks, ids, extra)
    config: Any = unwrap(chunks[0]).config
    layer_states = {name: _batch_first(state, config) for name, state in hidden.items()}
    stages = exchange.all_gather_stages((logits, layer_states))
    return ModelOutputs(
        next(stage_logits for stage_logits, _ in stages if stage_logits is not None),
        {name: state for _, states in stages for name, state in states.items()},
    )


@torch.no_grad()
def run_head(chunks: Sequence[nn.Module], ids: Tensor) -> Tensor:
    """Run the chunks of a model with a head; return its outputs [rows, sequence, n] on all ranks.

    Args:
        chunks: This rank's chunks.
        ids: Token ids [rows, sequence].
    """
    outputs = exchange.all_gather_stages(_run_pipeline(chunks, ids, {}, is_sharded=False))
    return next(output for output in outputs if output is not None)


def _run_pipeline(
    chunks: Sequence[nn.Module], ids: Tensor, extra: dict[str, Any], is_sharded: bool = True
) -> Tensor | None:
    """Run a forward pass through all stages; return the logits on the last stage.

    Args:
        chunks: This rank's chunks.
        ids: Token ids [rows, sequence].
        extra: Other inputs, such as images.
        is_sharded: Tensor-parallel ranks have different logits, which are gathered.
    """
    local_logits: list[Tensor] = []
    ids = ids.to(torch.cuda.current_device())
    usual = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    inputs: dict[str, Any] = {"attention_mask": None, **extra}
    inputs["position_ids"] = extra.get("position_ids", usual).to(ids.device)
    dtype = cast(Any, unwrap(chunks[0])).config.params_dtype
    media: dict[str, Tensor] = extra.get("media") or {}
    if media:  # image sizes stay on the host, where the model reads them
        moved = {
            name: value.to(ids.device, dtype)
            for name, value in media.items()
            if value.is_floating_point()
        }
        inputs["media"] = media | moved

    def step(_: Any, chunk: Any) -> tuple[Tensor, Any]:
        def keep(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
            shards = [logits]
            if is_sharded:
                group = exchange.tensor_group()
                shards = exchange.all_gather(logits, group, exchange.rank_and_size(group)[1])
            local_logits.append(torch.cat(shards, dim=-1).cpu())
            return logits.sum(), {}

        return chunk(input_ids=ids, **inputs), keep

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=cast(Any, None),
        model=list(chunks),
        num_microbatches=1,
        seq_length=ids.shape[1],
        micro_batch_size=ids.shape[0],
        forward_only=True,
    )
    return local_logits[0] if local_logits else None


@contextmanager
def _recorded_outputs(modules: dict[str, nn.Module], into: dict[str, Tensor]) -> Generator[None]:
    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            into[name] = cast(Tensor, output[0] if isinstance(output, tuple) else output).detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        into.update({name: state.cpu() for name, state in into.items()})


def _batch_first(state: Tensor, config: Any) -> Tensor:
    """Convert [sequence, rows, hidden] (a shard with sequence parallelism) to [rows, sequence, hidden]."""
    if config.sequence_parallel:
        device = torch.cuda.current_device()
        parts = exchange.all_gather(
            state.to(device), exchange.tensor_group(), config.tensor_model_parallel_size
        )
        state = torch.cat(parts).cpu()
    return state.transpose(0, 1)
