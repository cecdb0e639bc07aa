# SPDX-License-Identifier: Apache-2.0
"""Pruning: a smaller model from the layers and widths of a trained one that matter most (Minitron)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.surgery.folder import NewTensor, write_model
from megatron.bridge.models.surgery.importance import Importance, measure
from megatron.bridge.utils.errors import UserError, one_line, refuse

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_PER_LAYER = ("layer_types",)  # keys of a config that have a value for each layer


@dataclass(frozen=True)
class PrunedSizes:
    """Sizes of the smaller model; None keeps the size of the trained one."""

    layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    key_heads: int | None = None
    """Key heads, each of which keeps its query heads."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        """Yield a sentence for each size that is not below that of ``config``."""
        options = {
            "--layers": (self.layers, "num_hidden_layers"),
            "--hidden-size": (self.hidden_size, "hidden_size"),
            "--ffn-hidden-size": (self.intermediate_size, "intermediate_size"),
            "--key-heads": (self.key_heads, "num_key_value_heads"),
        }
        if all(value is None for value, _ in options.values()):
            yield f"no size is given: set one of {', '.join(options)}"
        for option, (value, key) in options.items():
            if value is not None and not 1 <= value <= config[key]:
                yield f"{option} {value}: must lie between 1 and {key}={config[key]} of the model"


@dataclass(frozen=True)
class KeptParts:
    """Indices of the parts that stay, in their order."""

    layers: list[int]
    channels: Tensor
    neurons: list[Tensor]
    """Of each layer that stays."""
    groups: list[Tensor]
    """Key heads of each layer that stays."""


def prune(
    source: PreTrainedCausalLM, folder: Path, sizes: PrunedSizes, batches: Iterable[Tensor]
) -> KeptParts:
    """Write the smaller model into ``folder``, and return what was kept.

    Args:
        source: The trained model.
        folder: The model folder to create.
        sizes: Of the smaller model.
        batches: Token ids [rows, length] of the calibration texts, without padding.

    Raises:
        UserError: The architecture is not supported, or a size does not fit.
    """
    from transformers import AutoModelForCausalLM

    config = _full_config(source)
    refuse(sizes.problems(config))
    _check_config(config, sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(source.directory, dtype="auto")
    importance = measure(loaded.to(device).eval(), batches)
    del loaded
    if importance.tokens == 0:
        raise UserError("the calibration data has no text: give a file with texts as --texts")
    kept_parts = choose(importance, sizes)
    tensors = dict(_tensors(source, config, kept_parts))
    write_model(source, folder, _pruned_config(config, kept_parts), tensors)
    return kept_parts


def _full_config(source: PreTrainedCausalLM) -> dict[str, Any]:
    """Return the config with the sizes that it may leave open."""
    config = dict(source.raw_config)
    if config.get("model_type") not in MODEL_TYPES:
        raise UserError(
            f"model_type={config.get('model_type')} cannot be pruned yet: use one of {', '.join(MODEL_TYPES)}"
        )
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    return config


def _check_config(config: dict[str, Any], sizes: PrunedSizes) -> None:
    """Let transformers check the sizes before any text is read: Llama's heads must divide the hidden size, for one."""
    from transformers import AutoConfig

    scores = Importance(
        neurons=[torch.zeros(config["intermediate_size"])] * config["num_hidden_layers"],
        groups=[torch.zeros(config["num_key_value_heads"])] * config["num_hidden_layers"],
        channels=torch.zeros(config["hidden_size"]),
        layers=torch.zeros(config["num_hidden_layers"]),
    )
    pruned = _pruned_config(config, choose(scores, sizes))
    model_type = pruned.pop("model_type")
    try:
        AutoConfig.for_model(model_type, **pruned)
    except Exception as error:  # each version of transformers has its own errors
        raise UserError(
            f"transformers refuses a model of these sizes ({one_line(error)}): choose others"
        ) from error


def choose(importance: Importance, sizes: PrunedSizes) -> KeptParts:
    """Choose the most important parts."""
    layers = _largest(importance.layers, sizes.layers).tolist()
    return KeptParts(
        layers=layers,
        channels=_largest(importance.channels, sizes.hidden_size),
        neurons=[_largest(importance.neurons[index], sizes.intermediate_size) for index in layers],
        groups=[_largest(importance.groups[index], sizes.key_heads) for index in layers],
    )


def _largest(scores: Tensor, count: int | None) -> Tensor:
    """Return the indices of the ``count`` largest scores in ascending order; those of all for None."""
    if count is None:
        return torch.arange(len(scores))
    return scores.topk(count).indices.sort().values


def _pruned_config(config: dict[str, Any], kept_parts: KeptParts) -> dict[str, Any]:
    queries_per_group = config["num_attention_heads"] // config["num_key_value_heads"]
    key_heads = len(kept_parts.groups[0])
    changed: dict[str, Any] = {
        "num_hidden_layers": len(kept_parts.layers),
        "hidden_size": len(kept_parts.channels),
        "intermediate_size": len(kept_parts.neurons[0]),
        "num_key_value_heads": key_heads,
        "num_attention_heads": key_heads * queries_per_group,
    }
    for key in _PER_LAYER:
        if config.get(key):
            changed[key] = [config[key][index] for index in kept_parts.layers]
    return config | changed


def _tensors(
    source: PreTrainedCausalLM, config: dict[str, Any], kept_parts: KeptParts
) -> Iterator[tuple[str, NewTensor]]:
    stored = source.state
    new_index = {old: new for new, old in enumerate(kept_parts.layers)}
    norm_factor = (config["hidden_size"] / len(kept_parts.channels)) ** 0.5
    for name in stored:
        head, layers, rest = name.partition("model.layers.")
        new_name = name
        layer = None
        if layers:
            old_index, _, rest = rest.partition(".")
            layer = new_index.get(int(old_index))
            if layer is None:
                continue
            new_name = f"{head}model.layers.{layer}.{rest}"
        kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        rows, columns = _indices(kind, layer, config, kept_parts)
        entry = stored.entries[name]
        shape = list(entry.shape)
        if rows is not None:
            shape[0] = len(rows)
        if columns is not None and len(shape) == 2:
            shape[1] = len(columns)
        # a norm divides by the mean over its channels, so fewer of them would make its output smaller
        factor = norm_factor if kind in _STREAM_NORMS else 1.0
        make = partial(_selected, source, name, rows, columns, factor)
        yield new_name, NewTensor(entry.dtype, tuple(shape), make)


_STREAM_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def _indices(
    kind: str, layer: int | None, config: dict[str, Any], kept_parts: KeptParts
) -> tuple[Tensor | None, Tensor | None]:
    """Return the rows and the columns of a tensor that stay; None keeps all."""
    channels = kept_parts.channels
    if kind in ("embed_tokens", "lm_head"):
        return None, channels
    if kind in _STREAM_NORMS:
        return channels, None
    if kind in ("q_norm", "k_norm"):
        return None, None
    if layer is None:
        raise UserError(f"the tensor {kind} is not one of a model that can be pruned")
    neurons = kept_parts.neurons[layer]
    if kind in ("gate_proj", "up_proj"):
        return neurons, channels
    if kind == "down_proj":
        return channels, neurons
    width = config["head_dim"]
    keys = _rows_of_groups(kept_parts.groups[layer], width)
    queries_per_group = config["num_attention_heads"] // config["num_key_value_heads"]
    queries = _rows_of_groups(kept_parts.groups[layer], width * queries_per_group)
    by_kind: dict[str, tuple[Tensor, Tensor]] = {
        "q_proj": (queries, channels),
        "k_proj": (keys, channels),
        "v_proj": (keys, channels),
        "o_proj": (channels, queries),
    }
    if kind not in by_kind:
        raise UserError(f"the tensor {kind} of a layer is not one of a model that can be pruned")
    return by_kind[kind]


def _rows_of_groups(groups: Tensor, width: int) -> Tensor:
    return (groups[:, None] * width + torch.arange(width)).flatten()


def _selected(
    source: PreTrainedCausalLM,
    name: str,
    rows: Tensor | None,
    columns: Tensor | None,
    factor: float,
) -> Tensor:
    tensor = source.state[name]
    if rows is not None:
        tensor = tensor.index_select(0, rows)
    if columns is not None and tensor.dim() == 2:
        tensor = tensor.index_select(1, columns)
    return tensor * factor if factor != 1.0 else tensor
