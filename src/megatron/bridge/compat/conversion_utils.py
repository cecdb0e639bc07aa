# SPDX-License-Identifier: Apache-2.0
"""Questions about models and checkpoints that bridges of other programs ask."""

import re
from typing import Any

from megatron.bridge.checkpoint import model_io
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM
from megatron.bridge.utils.errors import UserError


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """Return a chunk, or a list of chunks, without the wrappers of precision and data parallelism.

    Args:
        model: A chunk, or a list of them; the result has the same form.
        module_instances: Classes of wrappers to remove; None removes all that there are.
    """

    def unwrap(chunk: Any) -> Any:
        if module_instances is None:
            return model_io.unwrap(chunk)
        while isinstance(chunk, module_instances):
            chunk = chunk.module
        return chunk

    return [unwrap(chunk) for chunk in model] if isinstance(model, list) else unwrap(model)


def moe_experts_stored_packed(
    hf_pretrained: Any, layers_prefix: str, default: bool = False
) -> bool:
    """Return whether a checkpoint has one tensor for all experts of a projection.

    Args:
        hf_pretrained: The checkpoint, or a config, which has no tensors.
        layers_prefix: The names of tensors up to the number of the layer, such as ``model.layers.``.
        default: The result if the checkpoint has no experts, or is none.

    Raises:
        UserError: some layers have one tensor, and others have one for each expert.
    """
    if not isinstance(hf_pretrained, PreTrainedCausalLM):
        return default
    names = hf_pretrained.stored_names or hf_pretrained.state.entries
    experts = re.escape(layers_prefix) + r"\d+\.mlp\.experts\."
    is_packed = {
        re.match(experts + r"(gate_up_proj|down_proj)$", name) is not None
        for name in names
        if re.match(experts, name)
    }
    if len(is_packed) > 1:
        raise UserError(
            f"{hf_pretrained.model_name_or_path} has experts of {layers_prefix}* in both forms, one "
            "tensor for all and one for each: convert the checkpoint to one of them with transformers"
        )
    return is_packed.pop() if is_packed else default
