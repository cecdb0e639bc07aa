# SPDX-License-Identifier: Apache-2.0
"""Tokenised samples of a source: made in memory, or once for all runs in a folder named after their content.

Records are tokenised in parts. In a folder each part is a file that appears whole or not at all, so that a prepare
that was interrupted goes on behind the last one.
"""

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed

from megatron.bridge.data.encoding import Encoded, Encoder, EncodingRules, Numbered
from megatron.bridge.data.examples import Examples, Report
from megatron.bridge.data.parallel import ordered_map
from megatron.bridge.data.sources import Source
from megatron.bridge.data.tokenizer import Tokenizer, tokenizer_key
from megatron.bridge.utils import dist as process
from megatron.bridge.utils.atomic import publish, write_text
from megatron.bridge.utils.console import console, track
from megatron.bridge.utils.errors import UserError

PART_RECORDS = 1024  # a second of work or so: little is lost by a kill, and little is gained by larger parts
VERSION = 1  # of what is stored: another one is prepared anew
PATIENCE = timedelta(days=7)  # other ranks wait for the first as long as it takes


class Prepared(NamedTuple):
    """Samples, and what became of the records that they were made of."""

    examples: Examples
    report: Report


@dataclass(frozen=True)
class Preparation:
    """How samples are made.

    Attributes:
        folder: where they are kept for later runs, on all machines the same; None keeps them in memory.
        workers: processes that tokenise.
    """

    folder: Path | None = None
    workers: int = 1


def prepare(source: Source, tokenizer: Tokenizer, rules: EncodingRules, how: Preparation) -> Prepared:
    """The samples of ``source``; with a folder, all ranks must call this, and the first does the work.

    Raises:
        UserError: a record is wrong, no sample is left, or the folder cannot be used.
    """
    encoder = Encoder(tokenizer, rules)
    if how.folder is None:
        prepared = _in_memory(source, encoder, how.workers)
    else:
        final = how.folder / content_key(source, tokenizer, rules)
        _on_first_rank(lambda: None if final.is_dir() else _fill(final, source, encoder, how.workers))
        prepared = _load(final)
    if not len(prepared.examples):
        lines = ", ".join(prepared.report.lines()) if prepared.report.records else "it is empty"
        raise UserError(f"{source.name} leaves no example to learn from ({lines})")
    console().print(f"{source.name}: {'; '.join(prepared.report.lines())}", markup=False)
    return prepared


def content_key(source: Source, tokenizer: Tokenizer, rules: EncodingRules) -> str:
    """Name of the samples: another one as soon as anything that they depend on changes."""
    function = rules.process_example_fn
    values = {entry.name: getattr(rules, entry.name) for entry in fields(rules)}
    parts = [
        VERSION,
        source.fingerprint(),
        tokenizer_key(tokenizer),
        values | {"process_example_fn": None if function is None else _function_key(function)},
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _function_key(function: Callable[..., Any]) -> str:
    """Its text: a function of the same name may have become another one."""
    try:
        return f"{function.__module__}.{function.__qualname__}\n{inspect.getsource(function)}"
    except (OSError, TypeError, AttributeError) as error:
        raise UserError(
            f"dataset.process_example_fn={function!r} has no source text, by which prepared samples are told from "
            f"those of another function: write it as a function in a file, or leave dataset.prepared_dir unset"
        ) from error


def _in_memory(source: Source, encoder: Encoder, workers: int) -> Prepared:
    report = Report()
    parts = []
    with ordered_map(encoder, workers) as encode:
        for part in encode(chunk for _, chunk in _chunks(source)):
            parts.append(part.examples)
            report.add(part.report)
    return Prepared(_joined(parts), report)


def _joined(parts: list[Examples]) -> Examples:
    if len(parts) < 2:
        return parts[0] if parts else Examples.of([])
    starts = np.cumsum([0, *(part.bounds[-1] for part in parts)])
    bounds = [part.bounds[1:] + start for part, start in zip(parts, starts, strict=False)]
    return Examples(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.trained for part in parts]),
        np.concatenate([np.zeros(1, np.int64), *bounds]),
    )


def _chunks(source: Source) -> Iterator[tuple[int, list[Numbered]]]:
    records = iter(source.records())
    number = 0
    while chunk := list(islice(records, PART_RECORDS)):
        yield number, chunk
        number += 1


# ---------------------------------------------------------------------------------------------------- in a folder


def _fill(final: Path, source: Source, encoder: Encoder, workers: int) -> None:
    """Make the parts that are missing, then one set of arrays of all parts, and publish it."""
    parts = final.with_name(final.name + ".parts")
    try:
        parts.mkdir(parents=True, exist_ok=True)
        made = _make_parts(parts, source, encoder, workers)
        for _ in track(made, f"tokenising {source.name} (parts of {PART_RECORDS:,})"):
            pass
        _join_parts(parts, final)
        shutil.rmtree(parts)
    except OSError as error:
        raise UserError(f"dataset.prepared_dir={final.parent} cannot be written: {error.strerror}") from error


def _make_parts(folder: Path, source: Source, encoder: Encoder, workers: int) -> Iterator[int]:
    """Tokenise the parts that are not there yet; their numbers."""
    done: list[int] = []

    def missing() -> Iterator[list[Numbered]]:
        for number, chunk in _chunks(source):
            if not _part(folder, number).exists():
                done.append(number)
                yield chunk

    with ordered_map(encoder, workers) as encode:
        for number, part in enumerate(encode(missing())):
            _write_part(_part(folder, done[number]), part)
            yield done[number]


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.npz"


def _write_part(path: Path, part: Encoded) -> None:
    aside = path.with_suffix(".incomplete")
    with aside.open("wb") as file:
        examples = part.examples
        np.savez(
            file,
            tokens=examples.tokens,
            trained=examples.trained,
            bounds=examples.bounds,
            report=np.array(json.dumps(part.report.to_dict())),
        )
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _join_parts(parts: Path, final: Path) -> None:
    report, tokens, samples = Report(), 0, 0
    paths = sorted(parts.glob("*.npz"))
    for path in paths:
        part = Report.from_dict(json.loads(str(np.load(path)["report"])))
        report.add(part)
        tokens, samples = tokens + part.tokens, samples + part.samples
    staging = final.with_name(final.name + ".incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    _write_arrays(staging, paths, tokens, samples)
    write_text(staging / "report.json", json.dumps(report.to_dict()))
    publish(staging, final)


def _write_arrays(folder: Path, parts: list[Path], tokens: int, samples: int) -> None:
    create = np.lib.format.open_memmap
    all_tokens = create(folder / "tokens.npy", "w+", np.int32, (tokens,)) if tokens else np.empty(0, np.int32)
    all_trained = create(folder / "trained.npy", "w+", np.bool_, (tokens,)) if tokens else np.empty(0, np.bool_)
    bounds = np.zeros(samples + 1, dtype=np.int64)
    token, sample = 0, 0
    for path in parts:
        part = np.load(path)
        count, number = len(part["tokens"]), len(part["bounds"]) - 1
        all_tokens[token : token + count] = part["tokens"]
        all_trained[token : token + count] = part["trained"]
        bounds[sample + 1 : sample + number + 1] = part["bounds"][1:] + token
        token, sample = token + count, sample + number
    if not tokens:  # a map of nothing does not exist
        np.save(folder / "tokens.npy", all_tokens)
        np.save(folder / "trained.npy", all_trained)
    np.save(folder / "bounds.npy", bounds)


def _load(folder: Path) -> Prepared:
    try:
        bounds = np.load(folder / "bounds.npy")
        mode = "r" if bounds[-1] else None
        tokens, trained = (np.load(folder / f"{name}.npy", mmap_mode=mode) for name in ("tokens", "trained"))
        report = Report.from_dict(json.loads((folder / "report.json").read_text()))
        return Prepared(Examples(tokens, trained, bounds), report)
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(
            f"the prepared samples in {folder} cannot be read ({error}): remove that folder"
        ) from error


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the others wait as long as it takes; its error is everyone's."""
    if process.world_size() == 1 or not process.is_initialized():
        action()
        return
    group: Any = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    error: Exception | None = None
    if process.rank() == 0:
        try:
            action()
        except Exception as found:  # raised again, here and on the ranks that wait
            error = found
    carried = error if error is None or isinstance(error, UserError) else RuntimeError(f"rank 0: {error!r}")
    carried = process.broadcast_object(carried, 0, group)
    torch.distributed.destroy_process_group(group)
    if carried is not None:
        raise error or carried
