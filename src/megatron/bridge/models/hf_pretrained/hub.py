# SPDX-License-Identifier: Apache-2.0
"""Where the files of a model are: a local directory, or the hub's cache."""

from pathlib import Path
from typing import Any, cast

from megatron.bridge.utils.errors import UserError

# other serialisations of the same weights; stale beside a converted model, and large
WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.h5",
    "*.msgpack",
    "*.ckpt",
    "*.ot",
)
_OURS = ("*.safetensors", "*.safetensors.index.json")


def resolve(
    model: str | Path, *, weights: bool, revision: str | None = None, cache_dir: str | None = None
) -> Path:
    """The local directory of a model.

    Args:
        model: a directory, or a hub id such as ``HuggingFaceTB/SmolLM2-135M``.
        weights: whether the weights are needed; without them only the small files are downloaded.
        revision: branch, tag or commit on the hub.
        cache_dir: hub cache to use; huggingface_hub's own when None.

    Raises:
        UserError: neither a model directory nor a hub id whose files can be had.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is not a Hugging Face model: it has no config.json")
        return path
    if path.exists():
        raise UserError(f"{path} is a file: give the directory of the model, or a hub id")
    if path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") > 1:
        raise UserError(f"{path} does not exist: give the directory of a model, or a hub id")
    return _download(str(model), weights, revision, cache_dir)


def _download(model: str, weights: bool, revision: str | None, cache_dir: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    unwanted = [pattern for pattern in WEIGHT_PATTERNS if not (weights and pattern in _OURS)]
    try:
        download: Any = cast(Any, huggingface_hub).snapshot_download
        found = download(model, revision=revision, cache_dir=cache_dir, ignore_patterns=[*unwanted, "original/*"])
    except GatedRepoError as error:
        raise UserError(
            f"hub model {model} is gated: accept its licence on its page and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"{model} is neither a local directory nor a model on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{model} is neither a local directory nor in the hub cache, and the hub cannot be reached"
        ) from error
    except HfHubHTTPError as error:
        raise UserError(f"the hub refused to serve {model}: {error}") from error
    path = Path(found)
    if not (path / "config.json").is_file():
        raise UserError(f"hub model {model} has no config.json, so it is not a transformers model")
    return path
