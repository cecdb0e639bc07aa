# SPDX-License-Identifier: Apache-2.0
"""Convert the modules of a rank on the meta device to plain numbers whose time can be predicted."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from megatron.bridge.autotune.time.work import LayerShape, Matrix
from megatron.bridge.models.features.registry import FEATURES, feature_of
from megatron.bridge.models.flops import head_widths, keys_seen, operations_between

INTO_RESIDUAL = ("linear_proj", "linear_fc2", "out_proj")


def layers_of(chunk: Any) -> list[nn.Module]:
    """Return the decoder layers of a chunk, with multi-token prediction layers last."""
    ahead = getattr(chunk, "mtp", None)
    return [*chunk.decoder.layers, *(ahead.layers if ahead is not None else ())]


def layer_shape(layer: nn.Module, hidden: int, length: int) -> LayerShape:
    """Return the work of ``layer`` (on the meta device) on one rank for sequences of ``length`` tokens."""
    pairs = list(matrices(layer))
    dense = [matrix for path, matrix in pairs if not is_dispatched(path) and not is_undivided(path)]
    experts = [matrix for path, matrix in pairs if is_dispatched(path)]
    attention = next((item for item in layer.modules() if hasattr(item, "core_attention")), None)
    numbers = [
        (path, parameter.numel(), parameter.requires_grad)
        for path, parameter in layer.named_parameters()
    ]
    parameter_count = sum(count for _, count, _ in numbers)
    dispatched = sum(count for path, count, _ in numbers if is_dispatched(path))
    return LayerShape(
        matrices=tuple(dense),
        router=tuple(matrix for path, matrix in pairs if is_undivided(path)),
        experts=tuple(experts),
        between=sum(operations_between(module, length) for module in layer.modules()),
        scan_bytes=sum(map(_scan_bytes, layer.modules())),
        backward_scans=max(map(_backward_scans, layer.modules())),
        quadratic=attention is not None,
        norms=sum(weight_shape(module) == (hidden,) for module in layer.modules()),
        inner=sum(item.columns if item.name in INTO_RESIDUAL else item.rows for item in dense),
        blocks=sum(item.name in INTO_RESIDUAL for item in dense),
        keys=_key_width(attention),
        weights=parameter_count - dispatched,
        expert_weights=dispatched // _local_experts(layer),
        seen=keys_seen(attention, length) if attention is not None else 1.0,
        head=head_widths(attention.config)[1] if attention is not None else 0,
        expert_biases=any(is_dispatched(path) and "bias" in path for path, _, _ in numbers),
        clamped=any(_clamp_of(module) is not None for module in layer.modules()),
        trained=sum(count for _, count, trained in numbers if trained) / max(parameter_count, 1),
    )


def matrices(layer: nn.Module) -> Iterator[tuple[str, Matrix]]:
    """Yield all two-dimensional weights with their paths; for experts, only those of the first expert."""
    for path, module in layer.named_modules():
        weight = _weight_of(module)
        if (
            weight is None
            or weight.dim() != 2
            or ("local_experts." in path and "local_experts.0." not in path)
        ):
            continue
        yield path, Matrix(path.rpartition(".")[2], *weight.shape, trained=weight.requires_grad)


def weight_shape(module: Any) -> tuple[int, ...] | None:
    """Return the shape of the weight; for grouped experts, the shape of each expert's weight."""
    weight = _weight_of(module)
    return None if weight is None else tuple(weight.shape)


def keeps_input(module: Any) -> bool:
    """Return whether the gradient of a linear layer's weight, or of its adapter, needs the layer's input."""
    return hasattr(module, "adapter") or trained(module)


def trained(module: Any) -> bool:
    weight = _weight_of(module)
    return weight is None or weight.requires_grad


def _weight_of(module: Any) -> Tensor | None:
    return getattr(module, "weight0", getattr(module, "weight", None))


def is_dispatched(path: str) -> bool:
    return "experts" in path and "shared_experts" not in path


def is_undivided(path: str) -> bool:
    """Return whether all tensor-parallel ranks hold the full weight: of the router, or of a feature's layers."""
    return path.endswith("router") or any(
        path.endswith(feature.replicated_layers) for feature in FEATURES
    )


def _local_experts(layer: nn.Module) -> int:
    return next(
        (
            int(count)
            for module in layer.modules()
            if (count := getattr(module, "num_local_experts", None))
        ),
        1,
    )


def _scan_bytes(module: Any) -> float:
    feature = feature_of(type(module))
    return 0.0 if feature is None else feature.scan_bytes(module)


def _backward_scans(module: Any) -> float:
    feature = feature_of(type(module))
    return 0.0 if feature is None else feature.backward_scans


def _clamp_of(module: Any) -> float | None:
    return getattr(getattr(module, "config", None), "activation_func_clamp_value", None)


def _key_width(attention: Any) -> int:
    if attention is None:
        return 0
    config = attention.config
    if config.multi_latent_attention:
        width = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
        return attention.num_attention_heads_per_partition * width
    return 2 * attention.num_query_groups_per_partition * attention.hidden_size_per_attention_head
