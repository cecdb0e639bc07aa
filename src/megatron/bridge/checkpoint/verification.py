# SPDX-License-Identifier: Apache-2.0
"""See that a checkpoint is what was saved, before any of it is used."""

from pathlib import Path

from megatron.bridge.checkpoint import loading, manifest, paths
from megatron.bridge.checkpoint.collective import on_every_rank, on_first_rank
from megatron.bridge.checkpoint.manifest import DamagedError, Manifest, VerifyMode
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import first_few


def verify(directory: Path, mode: VerifyMode = "full") -> None:
    """Compare a checkpoint with its manifest, on all ranks; without a manifest, only check its files' sizes.

    Args:
        directory: One iteration's directory.
        mode: ``fast`` compares names and sizes, and the content of small files. ``full`` reads every file, each on
            one rank.

    Raises:
        DamagedError: naming what is damaged; the same on all ranks.
        UserError: the directory is not a checkpoint.
    """
    manifest_of_directory = on_first_rank(lambda: _look_over(directory, mode))
    if manifest_of_directory is None or mode == "fast":
        return
    local_share = manifest.shares(manifest_of_directory, distributed.world_size())[
        distributed.rank()
    ]
    sentences = on_every_rank(
        lambda: manifest.problems(directory, manifest_of_directory, local_share, "full")
    )
    raise_if_damaged(
        directory,
        sorted(sentence for part in distributed.all_gather_object(sentences) for sentence in part),
    )


def raise_if_damaged(directory: Path, sentences: list[str]) -> None:
    """Raise a ``DamagedError`` that names the first three files, if any were found."""
    if sentences:
        raise DamagedError.of(directory, first_few(sentences))


def _look_over(directory: Path, mode: VerifyMode) -> Manifest | None:
    stored_manifest = manifest.read(directory)
    if stored_manifest is None:
        loading.check_files(directory)
        return None
    manifest.check_identity(directory, stored_manifest, paths.iteration_of(directory))
    raise_if_damaged(
        directory, manifest.problems(directory, stored_manifest, stored_manifest.files, "fast")
    )
    if mode == "fast":
        loading.check_files(directory)
    return stored_manifest
