# SPDX-License-Identifier: Apache-2.0
"""Where things lie in a checkpoint directory.

::

    <root>/iter_0000010/                        one published checkpoint
    <root>/iter_0000020.1f3a9c07.incomplete/    left by an interrupted save; never loaded, removed later
    <root>/run.lock/                            the run that writes here now
    <root>/latest_checkpointed_iteration.txt    the tracker: the newest published iteration

    <root>/weights/, <root>/context/            one checkpoint of NeMo 2

The tracker, not the highest number, says what is newest: a directory appears before the tracker moves, and a run
that went back leaves higher numbers behind.
"""

import re
import shutil
from pathlib import Path

from megatron.bridge.checkpoint import bucket
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.utils import atomic, storage
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import url_of

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
RUN_CONFIG = "run_config.yaml"
TOKENIZER = "tokenizer"
ADAPTER_CONFIG = "adapter_config.json"  # in a directory that the peft library wrote
CHAT_TEMPLATE = "chat_template.jinja"  # the template that a run was trained with

NEMO_WEIGHTS, NEMO_CONTEXT = "weights", "context"
RELEASE = "release"  # as Megatron-LM names converted weights that no run has trained

REPLACED = ".replaced"  # as atomic.publish names it
REMOVED = ".removed"

_ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_dir(root: str | Path, iteration: int) -> Path:
    """The directory of one iteration.

    Example:
        >>> iteration_dir("run", 10).as_posix()
        'run/iter_0000010'
    """
    return storage.local(root) / f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int | None:
    """The iteration that a directory's name says, or None if it is not a checkpoint's name.

    Example:
        >>> iteration_of(Path("run/iter_0000010")), iteration_of(Path("run/iter_0000010.incomplete"))
        (10, None)
    """
    match = _ITERATION.fullmatch(directory.name)
    return int(match[1]) if match else None


def published_iterations(root: str | Path) -> list[int]:
    """The iterations that have a published directory, ascending, whether or not the tracker names them."""
    root = storage.local(root)
    bucket.refresh(root)
    if not root.is_dir():
        return []
    return sorted(
        iteration
        for path in root.iterdir()
        if (iteration := iteration_of(path)) is not None and path.is_dir()
    )


def latest_iteration(root: str | Path) -> int | None:
    """The newest published iteration, as the tracker names it; None without a tracker.

    Raises:
        DamagedError: the tracker does not hold a number, or names an iteration that is not there.
    """
    tracker = storage.local(root) / TRACKER
    bucket.refresh(tracker.parent)
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(
            f"cannot read {tracker}: {error}; write the iteration to load into it"
        ) from error
    if not text.isdecimal():
        raise DamagedError(
            f"{tracker} holds {text[:40]!r}, not an iteration number; {_choices_phrase(root)}"
        )
    if not iteration_dir(root, int(text)).is_dir():
        raise DamagedError(
            f"{tracker} names iteration {text}, but {iteration_dir(root, int(text))} is missing; "
            f"{_choices_phrase(root)}"
        )
    return int(text)


def refuse_used(root: str | Path) -> None:
    """Refuse a folder for new weights that holds a checkpoint, a Hugging Face model or a run.

    A new iteration would become the newest one: a trained run could no longer be used or resumed.

    Raises:
        UserError: the folder is used.
    """
    folder = storage.local(root)
    bucket.refresh(folder)
    if not folder.is_dir():
        return
    iterations = [iteration_dir("", iteration).name for iteration in published_iterations(folder)]
    markers = (TRACKER, RELEASE, NEMO_CONTEXT, NEMO_WEIGHTS, RUN_CONFIG, "config.json")
    contents = [*iterations, *(name for name in markers if (folder / name).exists())]
    if contents:
        raise UserError(
            f"output directory {folder} exists and holds {contents[0]}, which new weights would replace: choose "
            "another directory, or remove this one first"
        )


def resolve(path: str | Path) -> Path:
    """The directory of one iteration, from that directory, a root with a tracker, or a checkpoint of NeMo 2.

    Raises:
        UserError: nothing there can be loaded; the message names what is missing.
    """
    directory = _resolve_local(storage.local(path))
    storage.pull(directory, bucket.is_small, deep=True)
    return directory


def _resolve_local(path: Path) -> Path:
    bucket.refresh(path)
    if not path.exists():
        raise UserError(
            f"checkpoint {path} does not exist; give the directory that a run or an import saved to"
        )
    if not path.is_dir():
        raise UserError(
            f"checkpoint {path} is a file; give the directory that holds {TRACKER} or an iter_* directory"
        )
    if iteration_of(path) is not None or (path / "metadata.json").exists():
        return path
    if (path / NEMO_CONTEXT).is_dir():
        return path / NEMO_WEIGHTS
    if (
        (path / RELEASE).is_dir()
        and (path / TRACKER).is_file()
        and (path / TRACKER).read_text().strip() == RELEASE
    ):
        return path / RELEASE
    iteration = latest_iteration(path)
    if iteration is None:
        raise UserError(
            f"{path} holds no {TRACKER}, so no checkpoint was published there; {_choices_phrase(path)}"
        )
    return iteration_dir(path, iteration)


def remove(root: str | Path, iteration: int) -> None:
    """Delete a published checkpoint; if killed halfway, no directory is left that looks like a checkpoint."""
    directory = iteration_dir(root, iteration)
    if url_of(directory) is not None:
        bucket.remove(directory)
        return
    aside = directory.with_name(directory.name + REMOVED)
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def recover(root: str | Path) -> None:
    """Clean up after a killed writer; one process calls this before anything is read or written.

    Replacing a directory takes two renames; a kill between them leaves the old one as ``.replaced``, which is put back.
    Staging directories and half-deleted checkpoints are removed.
    """
    root = storage.local(root)
    if url_of(root) is not None:
        bucket.recover(root)
    if not root.is_dir():
        return
    for path in root.iterdir():
        name, _, suffix = path.name.partition(".")
        if iteration_of(Path(name)) is None or not suffix:
            continue
        if f".{suffix}" == REPLACED and not (root / name).exists():
            path.replace(root / name)
        elif f".{suffix}".endswith((atomic.STAGING_SUFFIX, REPLACED, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def write_tracker(root: str | Path, iteration: int) -> None:
    """Name ``iteration`` as the newest; its directory must have been published before."""
    _name_iteration(root, iteration, TRACKER)


def write_best(root: str | Path, iteration: int) -> None:
    """Name ``iteration`` as the one with the best evaluation; its directory must have been published before."""
    _name_iteration(root, iteration, BEST)


def _name_iteration(root: str | Path, iteration: int, file_name: str) -> None:
    """Write ``iteration`` into a file of the run's folder, and into that of its bucket, if it has one."""
    assert iteration_dir(root, iteration).is_dir(), (
        f"iteration {iteration} is not published in {root}"
    )
    file = storage.local(root) / file_name
    atomic.write_text(file, f"{iteration}\n")
    if url_of(file) is not None:
        bucket.push_beside(file.parent)


def best_iteration(root: str | Path) -> int | None:
    """Return the iteration with the best evaluation, or None if none is named."""
    try:
        text = (storage.local(root) / BEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _choices_phrase(root: str | Path) -> str:
    iterations = published_iterations(root)
    if not iterations:
        return "it contains no iter_* directory either: give another directory"
    names = ", ".join(iteration_dir("", iteration).name for iteration in iterations[-3:])
    return f"give one of its directories instead ({names})"
