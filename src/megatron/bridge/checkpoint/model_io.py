# SPDX-License-Identifier: Apache-2.0
"""The weights of a model, with the config they belong to, at a path."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.backends.low_bit import staging
from megatron.bridge.checkpoint import loading, lock, paths, saving, verification
from megatron.bridge.checkpoint.collective import on_every_rank, on_first_rank
from megatron.bridge.utils import atomic, distributed
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

CONTENT_METADATA = "content_metadata"
HF_MODEL_ID = "hf_model_id"
"""Key of a run config: the Hugging Face model that the weights were imported from."""
END = "...\n"  # YAML's end of a document

# Layers are stored one by one under their own number: a checkpoint is then independent of how they are spread over
# stages, and a message can name the layer.
MODEL_METADATA: dict[str, Any] = {"singleton_local_shards": False, "non_homogeneous_layers": True}

NEMO_PREFIX = "module."  # what NeMo 2 puts before the names of the weights
_PREFIX = "name_prefix"

# What else a checkpoint of a run may hold in addition to the weights.
RUN_STATE = "run_state"
DISTILLATION = "distillation"  # what a student was trained with and does not need any more
BESIDE_WEIGHTS = (
    "optimizer.",
    "chained_",
    "rng_state",
    "rerun_state",
    RUN_STATE,
    f"{DISTILLATION}.",
)


def save_model(
    chunks: Sequence[torch.nn.Module],
    root: str | Path,
    run_config: dict[str, Any],
    iteration: int = 0,
    tokenizer_files: Iterable[str | Path] | None = None,
    planner: MCoreSavePlanner | None = None,
) -> Path:
    """Save the weights of all ranks as ``<root>/iter_XXXXXXX`` and make it the newest checkpoint of ``root``.

    Args:
        chunks: This rank's model chunks, wrapped for data parallelism or not.
        root: Directory that holds the checkpoints of one run or one import.
        run_config: Plain data; its key ``model`` is the provider as ``to_plain`` writes it.
        iteration: Number of optimizer steps that the weights have seen.
        planner: Gives the numbers of chunks that are on the meta device.

    Returns:
        The directory that was published.

    Raises:
        UserError: the folder holds a checkpoint or a run, or cannot be written; nothing is left behind.
    """
    on_first_rank(lambda: paths.refuse_used(root))
    directory = paths.iteration_dir(root, iteration)
    state = {**model_state(chunks, MODEL_METADATA), CONTENT_METADATA: dict(MODEL_METADATA)}
    with _writing_to(root):
        saving.save(
            state,
            directory,
            extra_files(run_config, tokenizer_files),
            published=lambda: paths.write_tracker(root, iteration),
            planner=planner,
        )
    return directory


@contextmanager
def _writing_to(root: str | Path) -> Iterator[None]:
    """Hold the lock of ``root``, unless this run already holds it."""

    def take() -> bool:
        taken = lock.acquire(root)
        if taken:
            paths.recover(root)  # a killed save would keep its room on the disk
        return taken

    taken = on_first_rank(take)
    try:
        yield
    finally:
        if taken and distributed.rank() == 0:
            lock.release(root)


def load_model(chunks: Sequence[torch.nn.Module], path: str | Path, verify: bool = True) -> None:
    """Load weights into ``chunks``, under any parallel layout; a parameter without weights is an error.

    Args:
        chunks: This rank's model chunks, wrapped for data parallelism or not.
        path: A checkpoint root (the newest published iteration is taken) or one iteration's directory.
        verify: Whether to read every file first; False where that was done.

    Raises:
        UserError: no checkpoint, a damaged one, or one of another model.
    """
    directory, metadata = examine(chunks, path, verify)
    if staging.has_low_bit(chunks):
        _load_low_bit(chunks, directory, metadata)
        return
    loaded = loading.load(model_state(chunks, metadata), directory, known=BESIDE_WEIGHTS)
    set_model_state(chunks, loaded)


def _load_low_bit(
    chunks: Sequence[torch.nn.Module], directory: Path, metadata: dict[str, Any]
) -> None:
    """Load weights of which some are held in few bits: a few of them at a time are in memory in full."""
    bare_chunks = [unwrap(chunk) for chunk in chunks]
    with staging.in_full(bare_chunks) as staged:
        state = model_state(chunks, metadata)
        loading.check(state, directory, known=BESIDE_WEIGHTS)
        by_key = dict(zip(chunk_keys(chunks), staged, strict=True))
        loaded = on_every_rank(lambda: _read_in_batches(by_key, state, directory))
    for key, chunk in zip(chunk_keys(chunks), bare_chunks, strict=True):
        chunk.load_state_dict(loaded[key], strict=False)


def _read_in_batches(
    staged: dict[str, dict[str, staging.StagedWeight]], state: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Fill the low-bit weights of this rank; return the loaded state of its other parameters."""
    for key, names in staging.batches(staged):
        part = {key: {name: state[key].pop(name) for name in names}}
        values = loading.read(part, directory)[key]
        for name in names:
            staged[key][name].take(values[name])
    return loading.read(state, directory)


def examine(
    chunks: Sequence[torch.nn.Module], path: str | Path, verify: bool = True
) -> tuple[Path, dict[str, Any]]:
    """The directory of a complete checkpoint for ``chunks``, and its metadata.

    Raises:
        UserError: no checkpoint, a damaged one, or one of another vocabulary.
    """
    directory = on_first_rank(lambda: paths.resolve(path))
    if verify:
        verification.verify(directory)
    check_vocabulary(chunks, directory)
    metadata = stored_metadata(loading.load_common(directory))
    return directory, metadata | {_PREFIX: on_first_rank(lambda: _name_prefix(directory))}


def _name_prefix(directory: Path) -> str:
    names = loading.stored_keys(loading.check_files(directory))
    return NEMO_PREFIX if any(name.startswith(NEMO_PREFIX) for name in names) else ""


def has_run_config(path: str | Path) -> bool:
    """Whether a checkpoint has a run config; those of Megatron-LM do not.

    Raises:
        UserError: no checkpoint there.
    """
    return (paths.resolve(path) / paths.RUN_CONFIG).is_file()


def read_run_config(path: str | Path) -> dict[str, Any]:
    """The plain data of ``run_config.yaml``; key ``model`` is the provider.

    Raises:
        UserError: no checkpoint there, or one without that file.
    """
    directory = paths.resolve(path)
    file = directory / paths.RUN_CONFIG
    if not file.is_file():
        raise UserError(
            f"checkpoint {directory} has no {paths.RUN_CONFIG}, so its model is unknown; "
            "give one that this package saved, or export it with --hf-model, a model of the same architecture"
        )
    config = yaml_text.read(_whole_text(file), str(file))
    if not isinstance(config, dict) or "model" not in config:
        raise UserError(
            f"{file} has no key model, so the checkpoint's model is unknown; give one that this package saved"
        )
    return config


def _whole_text(file: Path) -> str:
    """The text that ``extra_files`` wrote: without its end mark, a truncated config would be valid YAML."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise loading.DamagedError.of(
            file.parent, f"{file.name} cannot be read ({error})"
        ) from error
    if not text.endswith(END):
        raise loading.DamagedError.of(file.parent, f"{file.name} does not end with {END.strip()!r}")
    return text


def tokenizer_dir(path: str | Path) -> Path | None:
    """The directory of the tokenizer files kept with a checkpoint, or None if it has none."""
    directory = paths.resolve(path) / paths.TOKENIZER
    return directory if directory.is_dir() else None


def trained_template(path: str | Path) -> str | None:
    """Return the chat template that a run was trained with instead of its tokenizer's.

    Args:
        path: checkpoint of a run, or a directory in the format of ``peft`` that was exported from one.

    Returns:
        The text of the template, or None if training used the tokenizer's own.
    """
    if (Path(path) / paths.ADAPTER_CONFIG).is_file():
        file = Path(path) / paths.CHAT_TEMPLATE
    else:
        file = paths.resolve(path) / paths.CHAT_TEMPLATE
    return atomic.read_text(file, str(file)) if file.is_file() else None


def extra_files(
    run_config: dict[str, Any],
    tokenizer_files: Iterable[str | Path] | None = None,
    chat_template: str | None = None,
) -> Callable[[Path], None]:
    """Return a function that writes config, tokenizer and chat template next to the shards.

    Args:
        run_config: Plain data of the config.
        tokenizer_files: Files to copy into the folder of the tokenizer.
        chat_template: Text of the template that the run is trained with, unless it is the tokenizer's.
    """
    text = yaml_text.write(run_config) + END

    def write(staging: Path) -> None:
        (staging / paths.RUN_CONFIG).write_text(text)
        if chat_template is not None:
            (staging / paths.CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
        for source in map(Path, tokenizer_files or ()):
            (staging / paths.TOKENIZER).mkdir(exist_ok=True)
            shutil.copyfile(source, staging / paths.TOKENIZER / source.name)

    return write


def unwrap(module: torch.nn.Module) -> MegatronModule:
    """The bare chunk inside wrappers for data parallelism and half precision."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module  # type: ignore[return-value]


def as_chunks(model: Any) -> list[Any]:
    """This rank's chunks, from a list, an ``nn.ModuleList`` or a single chunk."""
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.nn.ModuleList):
        return [model]
    return list(model)


def chunk_keys(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """The keys of the chunks' states in a state dict."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def model_state(chunks: Sequence[torch.nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of the chunks, sharing memory with their parameters."""
    states = {}
    for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
        bare = unwrap(chunk)
        with sharded_rows.as_whole_parameters(bare) as parameters:
            sharded_state = bare.sharded_state_dict(metadata=dict(metadata))
        forgotten = {name for name, _ in bare.named_parameters()} - sharded_state.keys()
        assert not forgotten, f"modules that do not say how they are sharded: {sorted(forgotten)}"
        states[key] = sharded_rows.keep_local_rows(sharded_state, parameters)
        add_prefix_for_sharding(states[key], metadata.get(_PREFIX, ""))
    return states


def set_model_state(chunks: Sequence[torch.nn.Module], loaded: dict[str, Any]) -> None:
    """Copy what ``loading.load`` returned into the chunks; most of it is in place already."""
    for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
        bare = unwrap(chunk)
        in_place = sharded_rows.sharded_names(bare)
        remaining = {name: value for name, value in loaded[key].items() if name not in in_place}
        outcome = bare.load_state_dict(remaining, strict=False)
        differing = {*outcome.missing_keys, *outcome.unexpected_keys} - in_place
        wrong = [name for name in sorted(differing) if "_extra_state" not in name]
        assert not wrong, f"not loaded after the checkpoint was read: {wrong}"
        sharded_rows.update_compute_weights(bare)


def stored_metadata(common: dict[str, Any]) -> dict[str, Any]:
    """The metadata for the names of a checkpoint's tensors, from its common state; the default is stacked layers."""
    content_metadata = common.get(CONTENT_METADATA) or {}
    return {key: content_metadata[key] for key in MODEL_METADATA if key in content_metadata}


def check_vocabulary(chunks: Sequence[torch.nn.Module], directory: Path) -> None:
    """Refuse a different vocabulary size, which the padded shapes of embeddings do not show.

    Raises:
        UserError: the model's and the checkpoint's vocabulary differ.
    """
    model_size = getattr(getattr(unwrap(chunks[0]), "config", None), "vocab_size", None)
    file = directory / paths.RUN_CONFIG
    if model_size is None or not on_first_rank(file.is_file):
        return
    saved = on_first_rank(lambda: read_run_config(directory))["model"]
    stored_size = saved.get("vocab_size") if isinstance(saved, dict) else None
    if stored_size is not None and stored_size != model_size:
        raise UserError(
            f"checkpoint {directory} has a vocabulary of {stored_size}, the model has vocab_size={model_size}; "
            f"set vocab_size to {stored_size}"
        )
