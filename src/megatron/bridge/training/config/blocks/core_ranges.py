# SPDX-License-Identifier: Apache-2.0
"""Legal ranges of the fields that Megatron-Core's configs of the optimizer and of data parallelism declare.

The classes that inherit these fields have the tables as ``INHERITED_RANGES``. They are in a module that imports no
torch, so that the command line can check numbers before it does.
"""

from megatron.bridge.utils.config.ranges import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    BELOW_ONE,
    FRACTION,
    Range,
)

OPTIMIZER_RANGES: dict[str, Range] = {
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "adam_eps": ABOVE_ZERO,  # a gradient of zero would be divided by zero
    "clip_grad": AT_LEAST_ZERO,
    "grad_norm_skip_threshold": ABOVE_ZERO,
    "hysteresis": AT_LEAST_ONE,
    "initial_loss_scale": ABOVE_ZERO,
    "loss_scale": ABOVE_ZERO,
    "loss_scale_window": AT_LEAST_ONE,
    "min_loss_scale": ABOVE_ZERO,
    "muon_momentum": BELOW_ONE,
    "optimizer_offload_fraction": FRACTION,
    "sgd_momentum": BELOW_ONE,
}

DDP_RANGES: dict[str, Range] = {
    "bucket_size": AT_LEAST_ONE,
    "num_buckets": AT_LEAST_ONE,
    "suggested_communication_unit_size": AT_LEAST_ONE,
}
