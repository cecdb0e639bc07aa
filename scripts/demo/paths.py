# SPDX-License-Identifier: Apache-2.0
"""Where the demo keeps its files: downloads and the source model in a cache, everything else in ``--out``."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.bridge.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MARKER = ".megatron-bridge-demo"
"""A file of this name marks a folder that an earlier demo made."""


@dataclass(frozen=True)
class Paths:
    """The folders of one demo."""

    cache: Path
    out: Path

    @property
    def sources(self) -> Path:
        """The unpacked packages."""
        return self.cache / "sources"

    @property
    def source_model(self) -> Path:
        """SmolLM2 as an ordinary Hugging Face directory."""
        return self.cache / "SmolLM2-135M-Instruct"

    @property
    def shakespeare_model(self) -> Path:
        """The model that was fine-tuned on Shakespeare, exported."""
        return self.out / "SmolLM2-135M-Shakespeare"

    @property
    def robot_model(self) -> Path:
        """The model with the LoRA adapter merged in."""
        return self.out / "SmolLM2-135M-Robot"

    @property
    def shapes_model(self) -> Path:
        """The vision-language model that learned to name shapes, exported."""
        return self.out / "Shapes-VL"

    @property
    def speech(self) -> Path:
        """The unpacked package that speaks."""
        return self.cache / "speech"

    @property
    def digits_model(self) -> Path:
        """The model that learned to understand digits, exported."""
        return self.out / "Digits-Audio"


def script(name: str) -> Path:
    """A helper script of the demo."""
    return Path(__file__).with_name(name)


def clear(out: Path) -> None:
    """Empty ``out``, but only if an earlier demo made it.

    Raises:
        UserError: the folder holds other files, or cannot be written.
    """
    try:
        if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
            raise UserError(f"--out {out} holds other files: choose another folder")
        shutil.rmtree(out, ignore_errors=True)
        (out / "logs").mkdir(parents=True)
        (out / MARKER).touch()
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written: {error.strerror}; choose another folder"
        ) from error
