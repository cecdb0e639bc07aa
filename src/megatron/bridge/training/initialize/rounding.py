# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training in a run: what is checked once the model exists, and said."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.quantize import can_hold, format_for
from megatron.bridge.models.conversion.model_bridge import as_dict, bridge_for
from megatron.bridge.models.features import quantization_aware
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError


def check_rounded_layers(config: ConfigContainer, chunks: Sequence[MegatronModule]) -> None:
    """Refuse patterns that keep no layer, and layers that no export can store; say how many matrices are rounded.

    Args:
        config: That of the run.
        chunks: All bare chunks of this rank; all ranks of a replica call this.
    """
    model = config.model
    if model.qat is None:
        return
    unused = quantization_aware.unused_patterns(chunks, model.qat_keep_high)
    of_stages = exchange.all_gather_stages((unused, list(_not_storable(model, chunks))))
    for pattern in model.qat_keep_high:
        if all(pattern in unused_here for unused_here, _ in of_stages):
            raise UserError(
                f"model.qat_keep_high={pattern!r} matches no layer: leave it out, or name a layer such as linear_proj"
            )
    for _, problems in of_stages:
        if problems:
            raise UserError(problems[0])
    count = sum(len(list(quantization_aware.rounded_parameters(chunk))) for chunk in chunks)
    print_rank_0(
        f"note: model.qat={model.qat} rounds {count} matrices of this rank in every pass; export with "
        "--quantize trained"
    )


def _not_storable(model: Any, chunks: Sequence[MegatronModule]) -> Iterator[str]:
    """Yield a sentence for each rounded matrix that the published layout cannot store in the format."""
    hf_config = getattr(model, "hf_config", None)
    if hf_config is None:
        return
    registry = bridge_for(hf_config).registry_for(model)
    model_type = as_dict(hf_config).get("model_type")  # a recipe's config is a dictionary
    row = format_for(model.qat, model_type)
    for chunk in chunks:
        for layer, parameter in quantization_aware.rounded_parameters(chunk):
            mapping = registry.megatron_to_hf_lookup(parameter.replace(".*.", ".0."))
            if mapping is not None and not can_hold(row, mapping):
                yield (
                    f"model.qat={model.qat!r} rounds {layer}, whose published tensors {model_type} does not "
                    f"store in this format: keep it in full with model.qat_keep_high=[{layer}], or use another format"
                )
