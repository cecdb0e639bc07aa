# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of multi-latent attention, with the same numbers as transformers.

In Megatron-Core, every attention layer owns its embedding, and YaRN's parameters follow different rules: with only
``mscale`` or ``mscale_all_dim`` they differ from transformers'. Here, frequencies and attention factor come from
transformers' own functions, as for other models (``models/features/rope.py``).
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron.bridge.models.features import rope
from megatron.bridge.utils.errors import UserError

_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


class LatentRotaryEmbedding(YarnRotaryEmbedding):
    """Angles of the ``qk_pos_emb_head_dim`` rotated dimensions of a head, shared by all layers."""

    def __init__(self, config: Any, cp_group: Any) -> None:
        parameters = {**config.rope_parameters, "rope_theta": config.rotary_base}
        self._reference = rope.reference_config(config, parameters, config.qk_pos_emb_head_dim)
        self._frequencies, self._attention_factor = rope.frequencies_and_factor(self._reference)
        rope.check_factors(parameters, len(self._frequencies))
        super().__init__(
            config.qk_pos_emb_head_dim,
            rotary_base=config.rotary_base,
            original_max_position_embeddings=config.original_max_position_embeddings,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=cp_group,
        )

    def get_emb(self, max_seq_len: int, offset: int = 0) -> tuple[torch.Tensor, float]:
        """Angles [position, 1, 1, qk_pos_emb_head_dim] from ``offset`` on, and the factor of sines and cosines."""
        length, device = offset + max_seq_len, torch.cuda.current_device()
        frequencies = self._frequencies = self._frequencies.to(device)
        if rope.changes_with_length(self._reference, length):
            frequencies = rope.frequencies_and_factor(self._reference, length)[0].to(device)
        angles = torch.outer(torch.arange(offset, length, device=frequencies.device, dtype=torch.float32), frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :], self._attention_factor


def derive(config: Any) -> None:
    """Set the Megatron-Core settings that ``config.rope_parameters`` implies, if it is set."""
    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return
    if kind not in _KINDS:
        raise UserError(
            f"rope_parameters.rope_type={kind!r} is not supported with multi-latent attention: {', '.join(_KINDS)} are"
        )
    config.rope_type = "yarn"  # the kind whose embedding has an attention factor
    # only sizes a first table of cosines: the least that can be shared out, as ``apply`` throws the layers' away
    config.original_max_position_embeddings = 2 * config.context_parallel_size
    # the softmax is scaled by (0.1 mscale_all_dim ln(factor) + 1)^2, section 3.1.4 of arXiv:2405.04434
    config.rotary_scaling_factor = parameters.get("factor", 1.0)
    config.mscale_all_dim = parameters.get("mscale_all_dim") or 0.0


def apply(model: Any, config: Any) -> None:
    """Share one embedding, as ``config.rope_parameters`` describes, among all attention layers of ``model``."""
    layers = [module for module in model.modules() if isinstance(module, MultiLatentAttention)]
    if config.position_embedding_type == "none":  # the same features, not rotated
        for layer in layers:
            layer.rotary_pos_emb.inv_freq.zero_()
    if (config.rope_parameters or {}).get("rope_type", "default") == "default":
        return
    if layers:
        shared = LatentRotaryEmbedding(config, layers[0].pg_collection.cp)
        for layer in layers:
            layer.rotary_pos_emb = shared
            if getattr(layer.core_attention, "indexer", None):
                layer.core_attention.indexer.rotary_pos_emb = shared
