# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: datasets of records, whose samples are packed or padded into rows."""

from megatron.bridge.utils.optional_imports import lazy_names

# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "prepare_finetuning_batch": "megatron.bridge.compat.batches:prepare_finetuning_batch",
        "split_batch_into_microbatches": "megatron.bridge.compat.batches:split_batch_into_microbatches",
    },
)
