# SPDX-License-Identifier: Apache-2.0
"""SQuAD, the default data set of fine-tuning examples."""

from typing import Any

from megatron.bridge.data.builders.hf_dataset import HFDatasetConfig
from megatron.bridge.data.config import PackedSequenceSpecs


def squad_example(record: dict[str, Any]) -> dict[str, str]:
    """Prompt and completion: the text with a question, and the first of its answers."""
    prompt = f"Context: {record['context']} Question: {record['question']} Answer:"
    return {"prompt": prompt, "completion": f" {record['answers']['text'][0].strip()}"}


def default_squad_config(
    seq_length: int, packed_sequence: bool = True, pad_seq_to_mult: int | None = None
) -> HFDatasetConfig:
    """SQuAD: questions whose answers are part of a given text.

    Args:
        seq_length: Tokens per row.
        packed_sequence: Whether to pack several samples into one row.
        pad_seq_to_mult: Pad each sample to a multiple of this length. None pads as the parallel layout requires.
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
