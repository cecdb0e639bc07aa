# SPDX-License-Identifier: Apache-2.0
"""One-line notes about a conversion, each printed once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.bridge.models.hf_pretrained.safetensors_files import dtype_name
from megatron.bridge.utils import console
from megatron.bridge.utils.errors import first_few


class Notes:
    """Print notes on the first rank; a note that was printed before is not repeated."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def add(self, note: str) -> None:
        if note not in self._printed:
            self._printed.add(note)
            console.console().print(f"note: {note}", markup=False)

    def add_unread_keys(self, values: Mapping[str, Any]) -> None:
        """Say which keys of a config, with their values, transformers' model does not read."""
        if not values:
            return
        keys = [f"{key}={value!r}" for key, value in values.items()]
        self.add(
            f"transformers' model never reads {first_few(keys, 6)} of the config, so neither does this one; the "
            "keys are carried along"
        )

    def add_unread_tensors(self, names: Sequence[str], directory: Path) -> None:
        """Say which tensors of a checkpoint transformers' model does not load."""
        if not names:
            return
        self.add(
            f"transformers' model does not load {first_few(names)} of {directory}, so neither does this one; an "
            "export copies them"
        )

    def add_rounding(self, trained: torch.dtype, exported: torch.dtype | None) -> None:
        """Say that an export rounds weights, if their dtype is more precise than that of the files."""
        if exported is None or exported.itemsize >= trained.itemsize:
            return
        self.add(
            f"the checkpoint's {dtype_name(trained)} weights are rounded to {dtype_name(exported)}, the dtype of the "
            f"Hugging Face model; --dtype {dtype_name(trained)} keeps them (weight_dtype in Python)"
        )
