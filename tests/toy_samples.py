# SPDX-License-Identifier: Apache-2.0
"""Eight samples of very different lengths, to pack, to join or to pad."""

import json
from pathlib import Path

import torch

from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from tests.toy_run import SEQUENCE, VOCABULARY

LENGTHS = [
    (2, 3),
    (20, 11),
    (1, 7),
    (5, 5),
    (9, 2),
    (4, 12),
    (3, 1),
    (6, 6),
]  # of prompts and completions


def write_samples(directory):
    """Write the samples, whose prompts are not learnt; returns ``directory``."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for lengths in LENGTHS:
        prompt, completion = (
            " ".join(
                str(int(token))
                for token in torch.randint(0, VOCABULARY - 1, (length,), generator=generator)
            )
            for length in lengths
        )
        lines.append(json.dumps({"prompt": prompt + " ", "completion": completion}) + "\n")
    (Path(directory) / "training.jsonl").write_text("".join(lines))
    return directory


def dataset(folder, kind, seq_length=SEQUENCE, multiple=None):
    """The samples of ``folder``, ``packed``, ``padding-free`` or ``padded``."""
    specs = PackedSequenceSpecs(
        packed_sequence_size=seq_length if kind == "packed" else -1, pad_seq_to_mult=multiple
    )
    return FinetuningDatasetConfig(
        dataset_root=str(folder),
        seq_length=seq_length,
        packed_sequence_specs=specs,
        padding_free=kind == "padding-free",
    )
