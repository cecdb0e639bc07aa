# SPDX-License-Identifier: Apache-2.0
"""Measure the real layers of a model on one device.

Their times include what kernel times omit: Python, autograd, the allocator, and operations that no formula counts.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.layers import layer_shape, layers_of
from megatron.bridge.autotune.predict import run_of
from megatron.bridge.autotune.profile import Samples
from megatron.bridge.autotune.time.work import LayerShape, operations_per_token
from megatron.bridge.backends.hardware import speed
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.precision import without_quantization

_CALLS = 4  # of each batch in a round; the first call is not counted
_ROUNDS = (
    5  # over all batches, so that a slow moment of the machine does not affect only one of them
)
_Size = tuple[int, int]
_Calls = list[dict[str, list[float]]]
_SHARE = 4  # the model may use this fraction of the device memory


def time_layers(config: ConfigContainer, memory: int, budget: float) -> dict[str, Samples]:
    """Measure the passes of each kind of layer, and of the embedding and the output layer.

    The model has one layer of each kind, one rank, and random weights. Batches range from parts of a sequence to eight
    sequences.

    Args:
        config: A resolved config; its layout is ignored.
        memory: Bytes of the device.
        budget: Seconds after which no larger batch starts.

    Returns:
        Samples of operations and seconds by name, such as ``attention forward`` and ``ends backward``. The dict is
        empty if the model does not fit on one device.
    """
    model: Any = config.model
    chunk, kinds = _short_model(config)
    chunk.to(model.resolved().params_dtype)
    if sum(passes_of_size.nbytes for passes_of_size in chunk.parameters()) * 2 > memory / _SHARE:
        return {}
    _fill_buffers(chunk)
    samples_by_name: dict[str, Samples] = {}
    calls: dict[_Size, _Calls] = {}
    end = time.monotonic() + budget
    with meta_model.as_only_rank(model), meta_model.nothing_random():
        for size in _batch_sizes(config.dataset.seq_length) * _ROUNDS:
            if calls and time.monotonic() > end:
                break
            calls.setdefault(size, []).extend(
                [_time_passes(chunk, *size) for _ in range(_CALLS)][1:]
            )
    for size, passes_of_size in calls.items():
        _add_medians(samples_by_name, config, size, chunk, kinds, passes_of_size)
    return {name: sorted(samples) for name, samples in samples_by_name.items()}


def _batch_sizes(length: int) -> list[_Size]:
    """Return batch sizes as rows and tokens, from small to large."""
    return [
        (1, length // 8),
        (1, length // 4),
        (1, length // 2),
        *((rows, length) for rows in (1, 2, 4, 8)),
    ]


def _short_model(config: ConfigContainer) -> tuple[Any, list[str]]:
    """Return the model on the meta device with one layer of each kind, and the kinds."""
    chunk: Any = meta_model.whole_model(without_quantization(config.model))
    first: dict[str, nn.Module] = {}
    for layer in layers_of(chunk)[: len(chunk.decoder.layers)]:
        first.setdefault(_shape_of_layer(config, layer, config.dataset.seq_length).kind, layer)
    chunk.decoder.layers = nn.ModuleList(first.values())
    return chunk, list(first)


def _shape_of_layer(config: ConfigContainer, layer: nn.Module, length: int) -> LayerShape:
    return layer_shape(layer, config.model.hidden_size, length)


def _fill_buffers(chunk: nn.Module) -> None:
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # Mamba mixers hold their parameters twice
    chunk.to_empty(device=speed.device())
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    for parameter in chunk.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in chunk.buffers():
        buffer.zero_()


def _add_medians(
    samples: dict[str, Samples],
    config: ConfigContainer,
    size: _Size,
    chunk: Any,
    kinds: list[str],
    calls: _Calls,
) -> None:
    """Add the median times of the passes of one batch size."""
    rows, length = size
    run = replace(
        run_of(config), tokens=rows * length, tensor=1, expert_tensor=1, sequence_parallel=False
    )
    operations = [
        run.tokens * operations_per_token(_shape_of_layer(config, layer, length), run)
        for layer in chunk.decoder.layers
    ]
    last = 2.0 * run.tokens * chunk.config.hidden_size * chunk.vocab_size
    for direction in ("forward", "backward"):
        names = [f"{kind} {direction}" for kind in (*kinds, "ends")]
        for index, (name, amount) in enumerate(zip(names, [*operations, last], strict=True)):
            seconds = statistics.median(call[direction][index] for call in calls)
            samples.setdefault(name, []).append((amount, seconds))


def _time_passes(chunk: Any, rows: int, length: int) -> dict[str, list[float]]:
    """Return the seconds of each layer forward and backward; the rest of the model comes last."""
    tokens = torch.randint(0, chunk.vocab_size, (rows, length), device=speed.device())
    positions = torch.arange(length, device=speed.device()).expand(rows, length)
    marks: dict[tuple[int, str], float] = {}
    hooks = [
        hook
        for index, layer in enumerate(chunk.decoder.layers)
        for hook in _add_time_hooks(layer, marks, index)
    ]
    start = _synchronized_time()
    loss = chunk(tokens, positions, None, labels=tokens).float().mean()
    middle = _synchronized_time()
    loss.backward()
    seconds_of_chunk = {"forward": middle - start, "backward": _synchronized_time() - middle}
    for hook in hooks:
        hook.remove()
    chunk.zero_grad(set_to_none=False)
    seconds_by_direction: dict[str, list[float]] = {}
    for direction, seconds in seconds_of_chunk.items():
        layers = range(len(chunk.decoder.layers))
        inside = [
            marks[index, f"{direction} end"] - marks[index, f"{direction} start"]
            for index in layers
        ]
        seconds_by_direction[direction] = [*inside, seconds - sum(inside)]
    return seconds_by_direction


def _synchronized_time() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _add_time_hooks(layer: nn.Module, marks: dict[tuple[int, str], float], index: int) -> list[Any]:
    """Register hooks that record when the passes of ``layer`` begin and end."""

    def mark(name: str) -> None:
        marks[index, name] = _synchronized_time()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden.register_hook(lambda gradient: mark("backward end"))
        mark("forward start")

    def behind(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mark("forward end")
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda gradient: mark("backward start"))

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(behind),
    ]
