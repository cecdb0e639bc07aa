# SPDX-License-Identifier: Apache-2.0
"""Tokenize the records of a source in memory, or once for all runs in a folder named by a hash of the content.

Records are tokenized in parts of ``PART_RECORDS``. In a folder, each part is a file that appears as a whole or not
at all, so an interrupted preparation resumes after the last part.
"""

import hashlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.records.encoding import EncodedRecords, RecordEncoder, media_processor
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.samples import EncodingReport, Samples
from megatron.bridge.data.records.sources import LocatedRecord, RecordSource
from megatron.bridge.data.tokenizer import Tokenizer, tokenizer_key
from megatron.bridge.data.worker_pool import ordered_map
from megatron.bridge.utils import distributed
from megatron.bridge.utils.atomic import (
    published_directory,
    published_file,
    refuse_unwritable,
    write_text,
)
from megatron.bridge.utils.console import console, track
from megatron.bridge.utils.errors import UserError

PART_RECORDS = 1024  # about a second of work: a kill loses little work, and larger parts would be hardly faster
VERSION = 2  # version of the stored files: samples of other versions, except the next line's, are prepared again
EARLIER_VERSION = (
    1  # differs in texts outside of chats with some tokenizers, and in nulls of tables
)
TIMEOUT = timedelta(days=7)  # the other ranks wait for rank 0 without a time limit


class PreparedSamples(NamedTuple):
    samples: Samples
    report: EncodingReport
    name: str = ""  # the source, for messages


def prepare(
    source: RecordSource, encoder: RecordEncoder, folder: Path | None = None, workers: int = 1
) -> PreparedSamples:
    """Tokenize the records of ``source``.

    The samples are stored for later runs in ``folder``, which all nodes share: all ranks must then call this, and
    rank 0 tokenizes with ``workers`` processes. Without a folder they stay in memory.
    """
    if folder is None:
        prepared = _in_memory(source, encoder, workers)
    else:
        final = _prepared_folder(folder, source, encoder)
        _on_first_rank(
            lambda: None if final.is_dir() else _write_samples(final, source, encoder, workers)
        )
        prepared = _load_samples(final)
    if not len(prepared.samples):
        lines = ", ".join(prepared.report.lines()) if prepared.report.records else "it is empty"
        raise UserError(f"{source.name} has no sample to train on ({lines}): check its records")
    return prepared._replace(name=source.name)


def content_key(
    source: RecordSource, tokenizer: Tokenizer, rules: EncodingRules, version: int = VERSION
) -> str:
    """Return a hash of everything that determines the samples; it names their folder.

    Args:
        source: the records.
        tokenizer: makes tokens of them.
        rules: how a record becomes a sample.
        version: of the code that does it.
    """
    function = rules.process_example_fn
    media = media_processor(tokenizer, rules)
    values = {
        entry.name: getattr(rules, entry.name) for entry in fields(rules) if entry.name != "media"
    }
    if rules.train_on_eos is None:
        del values["train_on_eos"]  # as before there was such a rule
    parts = [
        version,
        source.fingerprint(),
        tokenizer_key(tokenizer),
        values | {"process_example_fn": None if function is None else _function_key(function)},
        *([] if media is None else [media.key()]),
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _prepared_folder(folder: Path, source: RecordSource, encoder: RecordEncoder) -> Path:
    """Return the folder of the samples, which exists if they are prepared.

    Samples that an earlier version prepared are used as they are, so that its runs go on with the same data.
    """
    current, earlier = (
        folder / content_key(source, encoder.tokenizer, encoder.rules, version)
        for version in (VERSION, EARLIER_VERSION)
    )
    if current.is_dir() or not earlier.is_dir():
        return current
    console().print(
        f"note: the samples in {earlier} were prepared by an earlier version, which put an end-of-text token or a "
        "space before the completions of some tokenizers: remove the folder to prepare them again",
        markup=False,
    )
    return earlier


def _function_key(function: Callable[..., Any]) -> str:
    """Return the name and source code of ``function``: the code may change under the same name."""
    try:
        return f"{function.__module__}.{function.__qualname__}\n{inspect.getsource(function)}"
    except (OSError, TypeError, AttributeError) as error:
        raise UserError(
            f"dataset.process_example_fn={function!r} has no source code, which dataset.prepared_dir needs to "
            f"notice a change: define the function in a file, or leave dataset.prepared_dir unset"
        ) from error


def _in_memory(source: RecordSource, encoder: RecordEncoder, workers: int) -> PreparedSamples:
    report = EncodingReport()
    parts = []
    with ordered_map(encoder, workers) as encode:
        for part in encode(batched(source.records(), PART_RECORDS)):
            parts.append(part.samples)
            report.add(part.report)
    return PreparedSamples(Samples.concatenate(parts), report)


def _on_first_rank(action: Callable[[], None]) -> None:
    if distributed.world_size() == 1 or not distributed.is_initialized():
        action()
        return
    group: Any = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    try:
        on_first_rank(action, group)
    finally:
        torch.distributed.destroy_process_group(group)


def _write_samples(final: Path, source: RecordSource, encoder: RecordEncoder, workers: int) -> None:
    """Write the missing parts, join all parts into one set of arrays, and publish it."""
    parts = final.with_name(final.name + ".parts")
    with refuse_unwritable(f"dataset.prepared_dir={final.parent}"):
        parts.mkdir(parents=True, exist_ok=True)
        finished_parts = _make_parts(parts, source, encoder, workers)
        for _ in track(finished_parts, f"tokenizing {source.name} (parts of {PART_RECORDS:,})"):
            pass
        _join_parts(parts, final)
        shutil.rmtree(parts)


def _make_parts(
    folder: Path, source: RecordSource, encoder: RecordEncoder, workers: int
) -> Iterator[Path]:
    missing: list[Path] = []

    def records() -> Iterator[tuple[LocatedRecord, ...]]:
        for index, part in enumerate(batched(source.records(), PART_RECORDS)):
            path = folder / f"{index:06}.npz"
            if not path.exists():
                missing.append(path)
                yield part

    with ordered_map(encoder, workers) as encode:
        for index, part in enumerate(encode(records())):
            _write_part(missing[index], part)
            yield missing[index]


def _write_part(path: Path, part: EncodedRecords) -> None:
    samples = part.samples
    with published_file(path) as aside, aside.open("wb") as file:
        np.savez(
            file,
            tokens=samples.tokens,
            trained=samples.trained,
            bounds=samples.bounds,
            images=samples.images,
            image_bounds=samples.image_bounds,
            report=np.array(json.dumps(part.report.to_dict())),
        )


def _join_parts(parts: Path, final: Path) -> None:
    report = EncodingReport()
    paths = sorted(parts.glob("*.npz"))
    for path in paths:
        report.add(EncodingReport.from_dict(json.loads(str(np.load(path)["report"]))))
    with published_directory(final, overwrite=True) as staging:
        _write_pieces(
            staging, paths, "bounds", {"tokens": np.int32, "trained": np.bool_}, report.samples
        )
        if report.media:
            _write_pieces(staging, paths, "image_bounds", {"images": np.uint8}, report.samples)
        write_text(staging / "report.json", json.dumps(report.to_dict()))


def _write_pieces(
    folder: Path, parts: list[Path], bounds_name: str, kinds: dict[str, Any], samples: int
) -> None:
    """Join arrays that the array ``bounds_name`` divides into samples."""
    bounds = np.zeros(samples + 1, dtype=np.int64)
    sample = 0
    for path in parts:
        part = np.load(path)[bounds_name]
        bounds[sample + 1 : sample + len(part)] = part[1:] + bounds[sample]
        sample += len(part) - 1
    np.save(folder / f"{bounds_name}.npy", bounds)
    for name, dtype in kinds.items():
        joined = _create_array(folder / f"{name}.npy", dtype, int(bounds[-1]))
        start = 0
        for path in parts:
            part = np.load(path)[name]
            joined[start : start + len(part)] = part
            start += len(part)


def _create_array(path: Path, dtype: Any, length: int) -> np.ndarray:
    """Create a memory-mapped file, or an ordinary file for an empty array, which cannot be mapped."""
    if length:
        return np.lib.format.open_memmap(path, "w+", dtype, (length,))
    np.save(path, np.empty(0, dtype))
    return np.empty(0, dtype)


def _load_samples(folder: Path) -> PreparedSamples:
    try:
        bounds = np.load(folder / "bounds.npy")
        tokens, trained = (
            _map_array(folder / f"{name}.npy", bounds) for name in ("tokens", "trained")
        )
        report = EncodingReport.from_dict(json.loads((folder / "report.json").read_text()))
        images: list[np.ndarray] = []
        if report.media:
            image_bounds = np.load(folder / "image_bounds.npy")
            images = [_map_array(folder / "images.npy", image_bounds), image_bounds]
        return PreparedSamples(Samples(tokens, trained, bounds, *images), report)
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(
            f"the prepared samples in {folder} cannot be read ({error}): remove that folder"
        ) from error


def _map_array(path: Path, bounds: np.ndarray) -> np.ndarray:
    """Return the array, memory-mapped unless it is empty."""
    return np.load(path, mmap_mode="r" if bounds[-1] else None)
