# SPDX-License-Identifier: Apache-2.0
"""Where the files of a model are: a local directory, or the hub's cache; and the way back to the hub."""

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from megatron.bridge.utils import storage
from megatron.bridge.utils.errors import UserError

# other serialisations of the same weights; stale next to a converted model, and large
WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.h5",
    "*.msgpack",
    "*.ot",
)
# what a training run leaves next to a model: it says nothing about a model that is made of it
RUN_PATTERNS = (
    "run_config.yaml",
    "report.md",
    "loss.png",
    "metrics.jsonl",
    "environment.json",
    "git.diff",
    "trainer_state.json",
    "all_results.json",
    "train_results.json",
    "eval_results.json",
    "events.out.tfevents.*",
    "runs/*",
    "checkpoint-*/*",
    "iter_*/*",
    "adapter_config.json",  # an export holds the model alone
)
_INDEX = ("*.safetensors.index.json",)  # small, and says which tensors there are
_SAFETENSORS = ("*.safetensors", *_INDEX)
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # of models without safetensors
CONFIG = "config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def is_hf_model(path: str | Path) -> bool:
    """Whether ``path`` is the directory of a Hugging Face model."""
    folder = storage.local(path).expanduser()
    storage.pull(folder, {CONFIG})
    return (folder / CONFIG).is_file()


def is_megatron(path: str | Path) -> bool:
    """Return whether ``path`` is a directory of another format, which can only be a Megatron checkpoint."""
    return Path(path).is_dir() and not is_hf_model(path)


def is_peft_adapter(path: str | Path) -> bool:
    """Return whether ``path`` is an adapter in the format of the peft library; download one from object storage."""
    folder = storage.local(path)
    storage.pull(folder, {"adapter_config.json", "adapter_model.safetensors"})
    return os.path.lexists(folder / "adapter_config.json")  # a broken link is named when it is read


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def is_hub_id(name: str | Path) -> bool:
    """Whether ``name`` can be a model on the hub: no file or directory has this name, and it is no path."""
    text = str(storage.local(name))
    return (
        not Path(text).expanduser().exists()
        and text.count("/") <= 1
        and not text.startswith(("/", ".", "~"))
    )


def on_this_machine(name: str | Path) -> Path | None:
    """The folder of a Hugging Face model without the network: a directory, or the hub id of a cached model."""
    if not is_hub_id(name):
        return Path(name).expanduser() if is_hf_model(name) else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached_config = try_to_load_from_cache(str(name), CONFIG)
    except HFValidationError:
        return None
    return Path(cached_config).parent if isinstance(cached_config, str) else None


def resolve(
    model: str | Path, *, weights: bool, revision: str | None = None, cache_dir: str | None = None
) -> Path:
    """The local directory of a model.

    Args:
        model: a directory, or a hub id such as ``HuggingFaceTB/SmolLM2-135M``.
        weights: whether the weights are needed; without them only the small files are downloaded.
        revision: branch, tag or commit on the hub.
        cache_dir: hub cache to use; huggingface_hub's own when None.
    """
    path = storage.local(model).expanduser()
    unwanted = () if weights else WEIGHT_PATTERNS
    storage.pull(
        path,
        lambda name: not any(fnmatch(name, pattern) for pattern in unwanted),
        deep=True,
        exact=weights,
    )
    return local_folder(model) or _download_model(str(model), weights, revision, cache_dir)


def leaves_out_adapter(model: str | Path, adapter: str | Path | None) -> bool:
    """Return whether an adapter in the folder of ``model`` does not count: by ``none``, or as it is asked for."""
    if adapter in (None, "none"):
        return adapter == "none"
    folder = on_this_machine(model)
    return folder is not None and storage.local(adapter).expanduser().resolve() == folder.resolve()


def refuse_adapter_beside_weights(model: str | Path, ignored: bool) -> None:
    """Refuse a folder with a full model and an adapter, which transformers would apply, unless ``ignored``.

    The files of a hub id are examined where they are cached.
    """
    folder = on_this_machine(model) if is_hub_id(model) else local_folder(model)
    if folder is None or ignored or not is_peft_adapter(folder):
        return
    raise UserError(
        f"{folder} holds a model and an adapter (adapter_config.json), which transformers applies to it: merge it with "
        f"`megatron-bridge adapter merge --adapter {folder} --hf-model {folder} --hf-path DIR` and use DIR, or "
        "leave it out with --adapter none (checkpoint.ignore_adapter=true of a run, adapter='none' in Python)"
    )


def local_folder(model: str | Path) -> Path | None:
    """Return the directory of a model on this machine, or None if ``model`` can be a hub id; refuse anything else."""
    path = storage.local(model).expanduser()
    if is_hf_model(path):
        check_folder(path)
        return path
    if path.is_dir():
        raise UserError(f"{path} is not a Hugging Face model: it has no config.json")
    if path.exists():
        raise UserError(f"{path} is a file: give the directory of the model, or a hub id")
    if not is_hub_id(model):
        raise UserError(f"{path} does not exist: give the directory of a model, or a hub id")
    return None


def check_folder(directory: Path) -> None:
    """Refuse files that are not the model's own: pipes, devices, and links that lead out of the folder."""
    home = directory.resolve()
    allowed = [home]
    if (
        home.parent.name == "snapshots"
    ):  # the hub's cache keeps the files themselves in a folder next to it
        allowed.append(home.parents[1] / "blobs")
    for path in sorted(directory.iterdir()):
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{path} is a link to nothing: remove it, or download the model again"
            ) from error
        if path.is_symlink() and not any(target.is_relative_to(folder) for folder in allowed):
            raise UserError(
                f"{path} is a link out of the model's folder, to {target}: put the file itself there"
            )
        if not (target.is_file() or target.is_dir()):
            raise UserError(f"{path} is neither a file nor a folder: remove it")


def _download_model(model: str, weights: bool, revision: str | None, cache_dir: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    download: Any = cast(Any, huggingface_hub).snapshot_download
    source = {"repo_id": model, "revision": revision, "cache_dir": cache_dir}
    weight_patterns = _SAFETENSORS if weights else _INDEX
    unwanted = [pattern for pattern in WEIGHT_PATTERNS if pattern not in weight_patterns]
    try:
        path = Path(download(**source, ignore_patterns=[*unwanted, "original/*"]))
        if weights and not any(path.glob("*.safetensors")):
            path = Path(download(**source, allow_patterns=[*_PICKLED]))
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
    if not is_hf_model(path):
        raise UserError(f"hub model {model} has no config.json, so it is not a transformers model")
    return path


def push(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a complete Hugging Face model as one commit, and return its address.

    Args:
        directory: the model, as ``save_hf_pretrained`` writes it.
        repo_id: ``owner/name``; made if it does not exist.
        private: whether a new repository is private; None is the owner's default.
        revision: branch to commit to; the main one when None.
        commit_message: what the commit says.
        token: credentials; those of ``hf auth login`` when None.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    path = Path(directory).expanduser()
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give the model that was exported")
    resolve(path, weights=True)
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} has no weights to push: export the model first")
    api: Any = cast(Any, huggingface_hub).HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        message = commit_message or "Upload model"
        api.upload_folder(
            repo_id=repo,
            folder_path=path,
            revision=revision,
            commit_message=message,
            ignore_patterns=[".megatron-bridge.json"],  # the record of model_folder
        )
    except HFValidationError as error:
        raise UserError(f"repo_id={repo_id!r} is not a name on the hub: use owner/name") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the hub does not take {repo_id}: {reason}; log in with `hf auth login`"
        ) from error
    return f"{api.endpoint}/{repo}"
