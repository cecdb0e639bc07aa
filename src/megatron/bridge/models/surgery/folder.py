# SPDX-License-Identifier: Apache-2.0
"""Write a Hugging Face folder whose tensors are made from those of another one, one at a time."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.conversion.engine import side_files
from megatron.bridge.models.hf_pretrained import safetensors_writer
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM


@dataclass(frozen=True)
class NewTensor:
    """A tensor of the new model, and how it is made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_model(
    source: PreTrainedCausalLM,
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NewTensor],
) -> None:
    """Write a complete model folder, with the tokenizer and other files of ``source``.

    Args:
        source: The model that the new one is made from.
        folder: Where to publish the files; it may hold others.
        config: Content of ``config.json``.
        tensors: The tensors by their names.
    """
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    layouts = safetensors_writer.new_output_files(specs)
    with side_files.published(folder) as staging:
        for name in source.side_files():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.directory / name, staging / name)
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        safetensors_writer.create(staging, layouts)
        with safetensors_writer.Writer(staging, layouts) as writer:
            for name, tensor in tensors.items():
                writer.write(name, 0, tensor.make())
        safetensors_writer.write_index(staging, layouts, None)
