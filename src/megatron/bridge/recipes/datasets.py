# SPDX-License-Identifier: Apache-2.0
"""The data set that shows that fine-tuning works."""

from typing import Any

from megatron.bridge.data.builders.hf_dataset import HFDatasetConfig
from megatron.bridge.data.config import PackedSequenceSpecs


def squad_example(record: dict[str, Any]) -> dict[str, str]:
    """A question of SQuAD with its text as the prompt, and the first of its answers."""
    prompt = f"Context: {record['context']} Question: {record['question']} Answer:"
    return {"prompt": prompt, "completion": f" {record['answers']['text'][0].strip()}"}


def default_squad_config(
    seq_length: int, packed_sequence: bool = True, pad_seq_to_mult: int | None = None
) -> HFDatasetConfig:
    """SQuAD, whose questions are answered by a part of the text beside them.

    Args:
        seq_length: Tokens of a row.
        packed_sequence: Several samples in a row.
        pad_seq_to_mult: What the length of each is padded to a multiple of; None pads as the layout needs.
    """
    packing = PackedSequenceSpecs(packed_sequence_size=seq_length, pad_seq_to_mult=pad_seq_to_mult)
    return HFDatasetConfig(
        seq_length=seq_length,
        dataset_name="rajpurkar/squad",
        process_example_fn=squad_example,
        validation_split="validation",
        do_test=False,
        packed_sequence_specs=packing if packed_sequence else None,
    )
