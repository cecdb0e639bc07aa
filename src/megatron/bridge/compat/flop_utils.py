# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a config's model."""

from typing import Any

from megatron.bridge.models.flops import flops_per_token


def num_floating_point_operations(cfg: Any, batch_size: int = 1) -> float:
    """Operations of a step in which all weights of ``cfg.model`` are trained; all ranks of a replica call this.

    They are counted on an outline of the model, once for each ``cfg.model.seq_length``, the tokens of a sequence.
    """
    model = cfg.model
    length = cfg.model.seq_length
    counted = vars(model).setdefault("_flops_per_token", {})
    if length not in counted:
        counted[length] = flops_per_token(model.meta_model(), length)
    return counted[length] * length * batch_size
