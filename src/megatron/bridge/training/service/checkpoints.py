# SPDX-License-Identifier: Apache-2.0
"""Saved weights of the training service: ``tinker://MODEL/KIND/NAME`` is a folder next to its description."""

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

Kind = Literal["weights", "sampler_weights"]
_SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:.-]{0,255}")


@dataclass(frozen=True)
class Description:
    """What is known of saved weights without reading them."""

    base_model: str
    lora_rank: int
    lora_alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    created: float = 0.0  # seconds since 1970
    user_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SavedWeights:
    """Where weights are.

    Attributes:
        model: The model that saved them.
        kind: ``weights`` with the optimizer, to train on; ``sampler_weights`` in the format of ``peft``.
        name: Name among those of the model and the kind.
        folder: Their folder.
    """

    model: str
    kind: Kind
    name: str
    folder: Path

    @property
    def path(self) -> str:
        """Return what clients call them."""
        return f"{_SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def description_file(self) -> Path:
        """Return the file that makes them complete."""
        return self.folder.with_name(f"{self.name}.json")


class Checkpoints:
    """The saved weights in a folder.

    Args:
        root: The folder, which is created.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    def locate(self, model: str, kind: Kind, name: str) -> SavedWeights:
        """Return where weights of a name are, or will be.

        Raises:
            UserError: The name cannot be that of a folder.
        """
        if not _NAME.fullmatch(name) or name.endswith(".json"):
            raise UserError(
                f"name {name!r:.140}: use letters, digits and the characters _ - . to name weights"
            )
        folder = self._root / model.replace(":", "-") / kind / name
        return SavedWeights(model, kind, name, folder)

    def begin(self, weights: SavedWeights, overwrite: bool) -> Path:
        """Return the folder to save new weights to, before ``publish``.

        Raises:
            UserError: There are weights of this name, and ``overwrite`` is false.
        """
        if weights.description_file.exists() and not overwrite:
            raise UserError(f"{weights.path} exists: choose another name, or set overwrite=true")
        arriving = weights.folder.with_name(f"{weights.name}.arriving")
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.parent.mkdir(parents=True, exist_ok=True)
        return arriving

    def publish(self, weights: SavedWeights, arriving: Path, description: Description) -> None:
        """Make saved weights those of their name."""
        weights.description_file.unlink(missing_ok=True)
        shutil.rmtree(weights.folder, ignore_errors=True)
        arriving.rename(weights.folder)
        values = {**asdict(description), "created": time.time()}
        write_text(weights.description_file, json.dumps(values, indent=1) + "\n")

    def remove(self, weights: SavedWeights) -> None:
        """Delete weights."""
        weights.description_file.unlink(missing_ok=True)
        shutil.rmtree(weights.folder, ignore_errors=True)

    def find(self, path: str, kind: Kind | None = None) -> tuple[SavedWeights, Description]:
        """Return saved weights by what clients call them.

        Args:
            path: ``tinker://MODEL/KIND/NAME``.
            kind: What they must be; None takes both kinds.

        Raises:
            UserError: There are none, or they are of the other kind.
        """
        weights = self._parse(path)
        if kind is not None and weights.kind != kind:
            purpose = "train on" if kind == "weights" else "sample from"
            raise UserError(
                f"{path} holds {weights.kind}: give {kind}, which are weights to {purpose}"
            )
        try:
            values = json.loads(weights.description_file.read_text())
        except FileNotFoundError as error:
            raise UserError(
                f"{path} is not saved here: give the path that save_weights or save_weights_for_sampler returned"
            ) from error
        return weights, Description(**values)

    def _parse(self, path: str) -> SavedWeights:
        parts = path.removeprefix(_SCHEME).split("/")
        if path.startswith(_SCHEME) and len(parts) == 3 and _MODEL.fullmatch(parts[0]):
            model, kind_name, name = parts
            for kind in get_args(Kind):
                if kind == kind_name:
                    return self.locate(model, kind, name)
        raise UserError(
            f"{path!r:.200}: a path is tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
        )
