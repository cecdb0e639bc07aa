# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: products use weights as ``export --quantize`` will store them.

The matrices of attention, MLPs and experts are rounded, the same ones that an export quantizes. The rounding itself is
in ``backends/low_bit``.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Annotated, Any, cast

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from megatron.bridge.backends.low_bit import rounded_layers
from megatron.bridge.backends.low_bit.matrices import is_always_in_full, is_matrix
from megatron.bridge.backends.low_bit.rounded_layers import RoundedProducts
from megatron.bridge.backends.low_bit.rounding import ROUNDINGS, QATFormat
from megatron.bridge.models.features.feature import LayerFeature, differing
from megatron.bridge.utils.config.ranges import AT_LEAST_ONE
from megatron.bridge.utils.errors import UserError

# of a language model, or of one inside a vision-language model
_LAYER = re.compile(r"^((?:.*\.)?decoder\.layers\.)(\d+)(?=\.|$)")
_UNSUPPORTED = {
    "cuda_graph_impl": "none",
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
}


@dataclass
class QuantizationAwareFields:
    qat: QATFormat | None = None
    """The format of ``export --quantize`` that the model is trained for: products use weights rounded to it, and
    gradients pass the rounding unchanged. None computes with the weights themselves."""
    qat_group_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Neighbors that share a scale, for the formats that let one choose; None is the default of the format."""
    qat_keep_high: list[str] = field(default_factory=list[str])
    """Layers whose weights are not rounded: names in the full model, their ends, or patterns, such as
    ``linear_proj`` or ``decoder.layers.0.*``."""
    qat_inputs: bool = True
    """Round inputs of products as well, in the formats with which engines do (fp8-block, fp8-tensor, int8)."""


class QuantizationAwareFeature(LayerFeature):
    switches = {"qat": None}
    needs = {"qat_group_size": "qat", "qat_keep_high": "qat", "qat_inputs": "qat"}
    pricing = {
        "qat": "unpriced",
        "qat_group_size": "numbers",
        "qat_keep_high": "numbers",
        "qat_inputs": "numbers",
    }

    def check(self, config: Any) -> Iterator[str]:
        if config.qat is None:
            return
        context = f"with qat={config.qat!r}"
        yield from differing(config, _UNSUPPORTED, context, with_remedy=True)
        if config.backend not in ("auto", "torch"):
            yield (
                f"qat={config.qat!r} is for layers of PyTorch, not for backend={config.backend!r}: set "
                "model.backend=torch"
            )
        if config.qat_group_size is not None and not ROUNDINGS[config.qat].is_size_free:
            yield (
                f"qat_group_size={config.qat_group_size} cannot be used with qat={config.qat!r}, which has its own: "
                "leave it out"
            )

    def derive(self, config: Any) -> None:
        """Let autograd add up the gradients of rounded weights, which have no gradient buffer of their own."""
        if config.qat is not None:
            config.gradient_accumulation_fusion = False

    def change_model(self, model: nn.Module, config: Any) -> None:
        if config.qat is None:
            return
        for name, layer in linear_layers(model):
            if _is_kept(name, config.qat_keep_high):
                continue
            weights = _weights_of(layer)
            split = _split_of(layer, weights[0])
            published = _published_rows(model, name, layer, split, config)
            settings = RoundedProducts(
                format_name=config.qat,
                size=config.qat_group_size,
                weights=weights,
                with_inputs=config.qat_inputs,
                split=split,
                group=None if split is None else cast(Any, layer).tp_group,
                row_order=published.order,
            )
            _refuse_indivisible(name, layer, settings, published.lengths)
            rounded_layers.round_products(layer, settings)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a bare chunk that quantization-aware training can round.

    Names are those of the full model; experts that are modules of their own have ``*`` for their index, because all of
    a layer are rounded or none.
    """
    for path, module in model.named_modules():
        if _weights_of(module) and _can_be_rounded(f"{path}.weight"):
            if any(kind.__name__.startswith("TE") for kind in type(module).__mro__):
                raise UserError(
                    f"model.qat is for layers of PyTorch, and {path} is of Transformer Engine: set model.backend=torch"
                )
            yield _of_any_expert(_global_name(model, path)), module


def is_rounded(parameter_name: str, config: Any) -> bool:
    """Return whether training rounds a parameter of the full model.

    Args:
        parameter_name: With global indices of layers and experts, and the name of the weight.
        config: The provider that the model was trained with.
    """
    layer_name = _of_any_expert(parameter_name.rpartition(".")[0])
    return (
        config.qat is not None
        and _can_be_rounded(parameter_name)
        and not _is_kept(layer_name, config.qat_keep_high)
    )


def unused_patterns(chunks: Iterable[nn.Module], patterns: Sequence[str]) -> list[str]:
    """Return the patterns of ``qat_keep_high`` that keep no layer of this rank's chunks."""
    names = [name for chunk in chunks for name, _ in linear_layers(chunk)]
    return [pattern for pattern in patterns if not any(_is_kept(name, [pattern]) for name in names)]


def _can_be_rounded(parameter_name: str) -> bool:
    return is_matrix(parameter_name) and not is_always_in_full(parameter_name)


def _is_kept(layer_name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch(layer_name, pattern) or fnmatch(layer_name, f"*.{pattern}") for pattern in patterns
    )


def _global_name(model: nn.Module, path: str) -> str:
    """Return a module's name in the full model: a stage counts its layers from 0."""
    found = _LAYER.match(path)
    if found is None:
        return path
    layer: Any = model.get_submodule(found.group(0))
    return f"{found.group(1)}{layer.layer_number - 1}{path[found.end() :]}"


def _of_any_expert(layer_name: str) -> str:
    return re.sub(r"\.local_experts\.\d+\.", ".local_experts.*.", layer_name)


def _weights_of(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a layer's own matrices: one, or one for each expert of a grouped layer."""
    return tuple(
        name
        for name, parameter in layer.named_parameters(recurse=False)
        if re.fullmatch(r"weight\d*", name) and parameter.dim() == 2
    )


def _split_of(layer: nn.Module, weight: str) -> int | None:
    """Return the dimension of a weight that tensor-parallel ranks share, or None."""
    parameter: Any = layer.get_parameter(weight)
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return cast(int, parameter.partition_dim)


@dataclass(frozen=True)
class _PublishedRows:
    """The published matrices that a weight consists of, where blocks of rows share a scale.

    Attributes:
        lengths: Rows of each matrix on this rank, where a block could cross from one to another or to another rank.
        order: The rows of the weight in the order of these matrices, [rows]; None if they are in that order.
    """

    lengths: tuple[int, ...] = ()
    order: Tensor | None = None


def _published_rows(
    model: nn.Module, name: str, layer: nn.Module, split: int | None, config: Any
) -> _PublishedRows:
    if ROUNDINGS[config.qat].span != "block":
        return _PublishedRows()
    rows = layer.get_parameter(_weights_of(layer)[0]).shape[0]
    if name.endswith(".linear_qkv"):
        return _rows_of_heads(model, name, layer, rows)
    if name.endswith(".linear_fc1") and config.gated_linear_unit:
        return _PublishedRows((rows // 2, rows // 2))
    return _PublishedRows((rows,)) if split == 0 else _PublishedRows()


def _rows_of_heads(model: nn.Module, name: str, layer: nn.Module, rows: int) -> _PublishedRows:
    owners = (
        module
        for module in model.modules()
        if isinstance(module, SelfAttention) and getattr(module, "linear_qkv", None) is layer
    )
    attention: Any = next(owners, None)
    if attention is not None:
        width = attention.hidden_size_per_attention_head
        groups = attention.num_query_groups_per_partition
        queries = attention.num_attention_heads_per_partition * width
        keys = groups * width
        if rows == queries + 2 * keys:
            order = rounded_layers.row_order_of_heads(rows, groups, width)
            return _PublishedRows((queries, keys, keys), order)
    raise UserError(
        f"model.qat has blocks of rows, and {name} does not consist of queries, keys and values of one width: keep it "
        f"in full with model.qat_keep_high=[{name}], or use a format without blocks"
    )


def _refuse_indivisible(
    name: str, layer: nn.Module, settings: RoundedProducts, row_lengths: Sequence[int]
) -> None:
    """Refuse a matrix whose part on this rank does not divide into what shares a scale."""
    rounding = ROUNDINGS[settings.format_name]
    size = settings.size or rounding.size
    if size is None:
        return
    columns = layer.get_parameter(settings.weights[0]).shape[1]
    is_cut = settings.split == 1 and settings.group.size() > 1
    lengths = [("rows", rows) for rows in row_lengths]
    if rounding.span == "group" or is_cut:
        lengths.append(("columns", columns))
    for direction, length in lengths:
        if length % size:
            raise UserError(
                f"model.qat={settings.format_name!r} lets {size} neighbors share a scale, and a tensor-parallel rank "
                f"has {length} {direction} of a published matrix in {name}: use another model.qat_group_size or fewer "
                f"ranks, or keep it in full with model.qat_keep_high=[{name}]"
            )


def rounded_parameters(chunk: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the layer and the name of each parameter of a bare chunk that is rounded, by names in the full model.

    Experts of a grouped layer have the indices of this rank.
    """
    for name, layer in linear_layers(chunk):
        settings = rounded_layers.settings_of(layer)
        if settings is not None:
            for weight in settings.weights:
                yield name, f"{name}.{weight}"
