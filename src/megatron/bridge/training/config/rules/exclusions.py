# SPDX-License-Identifier: Apache-2.0
"""The rule on settings that exclude each other."""

from collections.abc import Iterator

from megatron.bridge.training.config.rules.lookup import value_of
from megatron.bridge.training.config.run_config import RunConfig

EXCLUSIONS: dict[tuple[str, str], str] = {
    ("model.bf16", "model.fp16"): "switch one off, or set mixed_precision",
    ("model.overlap_p2p_comm", "model.batch_p2p_comm"): "set model.batch_p2p_comm=false",
    # gradients are divided by the number of tokens at the end, so the collective must sum
    ("model.calculate_per_token_loss", "ddp.average_in_collective"): "switch the second off",
    ("model.cpu_offloading", "model.fine_grained_activation_offloading"): "switch one off",
    ("ddp.bucket_size", "ddp.num_buckets"): "remove one, because both set the size of a bucket",
    ("dist.use_torch_fsdp2", "ddp.use_megatron_fsdp"): "remove one of them",
    ("scheduler.lr_decay_samples", "scheduler.lr_decay_iters"): "remove one",
    ("scheduler.lr_warmup_samples", "scheduler.lr_warmup_iters"): "remove one",
    ("scheduler.lr_wsd_decay_samples", "scheduler.lr_wsd_decay_iters"): "remove one",
    ("scheduler.lr_warmup_fraction", "scheduler.lr_warmup_iters"): "remove one",
    ("scheduler.lr_warmup_fraction", "scheduler.lr_warmup_samples"): "remove one",
    ("scheduler.use_checkpoint_opt_param_scheduler", "scheduler.override_opt_param_scheduler"): "switch one off",
}
"""Two settings of which one must be off or unset -> the way out."""


def settings_do_not_exclude_each_other(config: RunConfig, world_size: int) -> Iterator[str]:
    """Of some pairs of settings, such as ``model.bf16`` and ``model.fp16``, at most one may be set."""
    for keys, way_out in EXCLUSIONS.items():
        values = [value_of(config, key) for key in keys]
        # a fraction or a number of samples counts as given even if it is 0
        if values[1] and values[0] is not None and values[0] is not False:
            first, second = (f"{key}={value}" for key, value in zip(keys, values, strict=True))
            yield f"{first} and {second} exclude each other: {way_out}"
