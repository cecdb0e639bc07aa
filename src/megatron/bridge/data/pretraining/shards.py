# SPDX-License-Identifier: Apache-2.0
"""A corpus in shards, which any number of machines write, and which is read as one corpus.

``PREFIX.manifest.json`` lists the inputs of each shard and, when all are finished, their contents. ``PREFIX.idx`` is
the index that one process would write; the tokens stay in ``PREFIX.shards``. A shard gets its final name when it is
complete, so a kill leaves no partial shard, and two machines may write the same shard. The reports of executors are
not used: a shard is finished if it is on disk with the right hashes.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader, _IndexReader

from megatron.bridge.data.pretraining.indexed_writer import (
    HEADER,
    DocumentLengths,
    IndexedDatasetWriter,
    WriterState,
    check_digests,
    digest,
    finished_state,
    write_index,
)
from megatron.bridge.data.pretraining.inputs import InputPart, divided, read_chunks
from megatron.bridge.data.pretraining.preprocess import (
    DocumentEncoder,
    PreprocessConfig,
    checked_parts,
    dataset_key,
    refuse_existing,
)
from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.data.tokenizer import tokenizer_key
from megatron.bridge.data.worker_pool import ordered_map
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import published_file, refuse_unwritable, write_text
from megatron.bridge.utils.console import console, track
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import installed, missing_message

EXECUTORS = {
    "local": (),
    "slurm": ("datatrove",),
    "ray": ("ray", "datatrove"),
}  # and the packages that they need
EXTRAS = {"slurm": "shards", "ray": "ray"}
ROUNDS = 3  # rounds without a new shard, for example if each worker runs out of memory
SUMS = ("documents", "tokens", "empty", "input_bytes")


def manifest_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.manifest.json")


def finished_manifest(prefix: Path | str) -> dict[str, Any] | None:
    """Return the manifest of a corpus in shards, or None if there is no such corpus, or if it is not finished."""
    path = manifest_path(prefix)
    if not path.is_file() or Path(f"{prefix}.bin").exists():
        return None
    manifest = _read_manifest(path, path.stat().st_mtime_ns)
    return manifest if isinstance(manifest, dict) and "documents" in manifest else None


@lru_cache(maxsize=64)
def _read_manifest(path: Path, changed: int) -> Any:
    """Read a manifest, which every split of a dataset needs several times."""
    return strict_json.read(path)


def shard_prefix(prefix: Path | str, index: int) -> Path:
    return Path(f"{prefix}.shards", f"{index:06d}")


@dataclass
class ShardPlan:
    """The inputs of each shard, in the order of the documents."""

    config: PreprocessConfig
    key: str  # hash of everything that determines the corpus
    tokenizer: str  # hash of the tokenizer
    token_bytes: int
    shards: list[list[InputPart]]

    @classmethod
    def of(
        cls, config: PreprocessConfig, encoder: DocumentEncoder, shard_bytes: int
    ) -> "ShardPlan":
        """Divide the inputs. The same inputs give the same plan, also on machines with another working directory."""
        if (folder := Path(config.tokenizer_model).expanduser()).is_dir():
            config = replace(config, tokenizer_model=str(folder.absolute()))
        template = template_text(config.chat_template)
        config = replace(
            config, output_prefix=config.output_prefix.absolute(), chat_template=template
        )
        parts = [
            part if ":" in part.url else part._replace(url=str(Path(part.url).absolute()))
            for part in checked_parts(config)
        ]
        shards = divided(config, parts, shard_bytes)
        key = dataset_key(config, encoder.tokenizer, [], shards)
        return cls(config, key, _tokenizer_hash(encoder), np.dtype(encoder.dtype).itemsize, shards)

    @classmethod
    def load(cls, path: Path) -> "ShardPlan":
        saved = strict_json.read(path)
        try:
            config = saved["config"] | {"output_prefix": Path(saved["config"]["output_prefix"])}
            shards = [[InputPart(*part) for part in shard["parts"]] for shard in saved["shards"]]
            return cls(
                PreprocessConfig(**config),
                saved["key"],
                saved["tokenizer"],
                saved["token_bytes"],
                shards,
            )
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path} is not a manifest of this version: choose another --output-prefix"
            ) from error

    def save(self, states: list[WriterState] | None = None, **more: Any) -> None:
        state_dicts = [asdict(fact) for fact in states or ()] or [{} for _ in self.shards]
        shards = [
            {"parts": parts} | fact for parts, fact in zip(self.shards, state_dicts, strict=True)
        ]
        text = json.dumps(asdict(self) | {"shards": shards} | more, default=str, indent=1)
        write_text(manifest_path(self.config.output_prefix), text)

    def prefix(self, index: int) -> Path:
        return shard_prefix(self.config.output_prefix, index)

    @property
    def folder(self) -> Path:
        return self.prefix(0).parent

    def aside(self, index: int, name: str) -> Path:
        """Return the path of a temporary file of a shard; these files are removed when all shards are finished."""
        return self.folder / "incomplete" / f"{index:06d}.{name}"

    def name(self, index: int) -> str:
        parts = self.shards[index]
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        return f"shard {index} of {len(self.shards)} ({parts[0].name}{more})"

    def made(self, index: int) -> WriterState | None:
        """Return the state of a shard, or None unless the shard is complete and belongs to this plan."""
        state = finished_state(self.prefix(index))
        if state is None or state.key != self.key:
            return None
        with suppress(UserError):
            check_digests(str(self.prefix(index)), state.digests)
            return state
        return None

    def missing(self, numbers: Iterable[int]) -> list[int]:
        return [index for index in numbers if self.made(index) is None]


def preprocess_shards(
    config: PreprocessConfig, executor: str, shard_bytes: int, sbatch: dict[str, str]
) -> dict[str, Any]:
    """Make the missing shards, and return the manifest. After an error or a kill, the same call resumes."""
    if (executor == "slurm") != ({"partition", "time"} <= sbatch.keys()) or (
        sbatch and executor != "slurm"
    ):
        raise UserError(
            f"--executor {executor} with --sbatch {' '.join(sbatch)}: --sbatch partition=NAME time=HH:MM:SS belongs to "
            f"--executor slurm, and only there"
        )
    for package in EXECUTORS[executor]:
        if not installed(package):
            raise UserError(
                missing_message(
                    package, f"--executor {executor}", EXTRAS[executor], is_setting=False
                )
            )
    encoder = DocumentEncoder(config)
    plan = ShardPlan.of(config, encoder, shard_bytes)
    with refuse_unwritable(
        f"--output-prefix={config.output_prefix}", "free some space, or choose another one"
    ):
        _claim_folder(plan)
    missing = plan.missing(range(len(plan.shards)))
    fruitless = 0
    if not missing and (manifest := finished_manifest(plan.config.output_prefix)):
        return manifest
    while missing and fruitless < ROUNDS:
        _run_rounds(plan, encoder, missing, executor, sbatch)
        left = plan.missing(missing)
        fruitless = fruitless + 1 if len(left) == len(missing) else 0
        missing = left
    if missing:
        raise UserError(_lost_sentence(plan, missing))
    return _join_shards(plan)


def make_shards(path: Path, numbers: list[int]) -> None:
    """Make shards of the plan at ``path`` in a process of an executor, and write an error to a file for the caller."""
    plan = ShardPlan.load(path)
    try:
        encoder = DocumentEncoder(plan.config)
        if _tokenizer_hash(encoder) != plan.tokenizer:
            raise UserError(
                f"--tokenizer-model={plan.config.tokenizer_model} is another tokenizer here: copy it again"
            )
        error_text = next(filter(None, (make_shard(plan, encoder, index) for index in numbers)), "")
    except UserError as error:
        error_text = f"node {socket.gethostname()}: {error}"
    if error_text:
        write_text(plan.aside(numbers[0], "failed"), error_text)


def make_shard(plan: ShardPlan, encoder: DocumentEncoder, index: int) -> str:
    """Make a shard unless it exists, and return the error of its input or the disk, if any."""
    try:
        if plan.made(index) is None:
            _write_shard(plan, encoder, index)
    except (UserError, OSError) as error:
        return f"{plan.name(index)} failed on node {socket.gethostname()}: {error}"
    return ""


def _write_shard(plan: ShardPlan, encoder: DocumentEncoder, index: int) -> None:
    aside = plan.aside(index, f"{socket.gethostname()}.{os.getpid()}")
    node = socket.gethostname()
    with IndexedDatasetWriter(aside, encoder.dtype, plan.key) as output:
        for documents in map(
            encoder, read_chunks(plan.config, plan.shards[index], output.state.place)
        ):
            output.write(documents)
    state = output.state
    sha256 = hashlib.sha256()
    lengths = np.fromfile(f"{aside}.idx", np.int32, state.report.documents, offset=HEADER.size)
    for ending in (".bin", ".idx"):
        with Path(f"{aside}{ending}").open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    low, middle, high = np.percentile(lengths, (0, 50, 100)) if len(lengths) else (0, 0, 0)
    state.facts = {"node": node, "sha256": sha256.hexdigest()}
    state.facts |= {"shortest": int(low), "median": int(middle), "longest": int(high)}
    state.save(Path(f"{aside}.source.json"))
    for ending in (".bin", ".idx", ".source.json"):
        Path(f"{aside}{ending}").replace(f"{plan.prefix(index)}{ending}")


def _claim_folder(plan: ShardPlan) -> None:
    """Keep shards of the same plan; refuse shards of another plan, or remove them if the config allows it."""
    path = manifest_path(plan.config.output_prefix)
    if not path.is_file() or ShardPlan.load(path).key != plan.key:
        refuse_existing(plan.config, (".manifest.json", ".bin", ".idx"))
        shutil.rmtree(plan.folder, ignore_errors=True)
        for ending in (".bin", ".idx", ".source.json"):
            Path(f"{plan.config.output_prefix}{ending}").unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save()
    plan.aside(0, "").parent.mkdir(parents=True, exist_ok=True)
    for note in plan.folder.glob("incomplete/*.failed"):
        note.unlink()


def _run_rounds(
    plan: ShardPlan,
    encoder: DocumentEncoder,
    missing: list[int],
    executor: str,
    sbatch: dict[str, str],
) -> None:
    error_text = ""
    if executor == "local":  # a killed worker ends the pool, and the next round resumes
        with (
            suppress(UserError),
            ordered_map(partial(make_shard, plan, encoder), plan.config.workers) as run_ordered,
        ):
            shown = track(run_ordered(missing), "", len(missing), show=console().is_terminal)
            error_text = next(filter(None, shown), "")
    else:
        broken = _run_cluster(plan, missing, executor, sbatch)
        error_text = next(
            (note.read_text() for note in sorted(plan.folder.glob("incomplete/*.failed"))), broken
        )
    if error_text:
        raise UserError(error_text)


def _run_cluster(plan: ShardPlan, missing: list[int], executor: str, sbatch: dict[str, str]) -> str:
    """Run the executor in its own process, which Ray kills if it loses the cluster, and return the error."""
    log = plan.folder / f"{executor}.log"
    path = str(manifest_path(plan.config.output_prefix))
    work = {
        "executor": executor,
        "plan": path,
        "missing": missing,
        "workers": plan.config.workers,
        "sbatch": sbatch,
    }
    code = "from megatron.bridge.data.pretraining.shard_cluster import main; main()"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            process.communicate(json.dumps(work).encode())
        finally:
            process.terminate()
            process.wait()
    lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    last_line = [*lines, *(line for line in lines if line.startswith("sbatch: error: "))][-1]
    node = (
        os.environ.get("RAY_ADDRESS", socket.gethostname())
        if executor == "ray"
        else socket.gethostname()
    )
    left = f"{len(plan.missing(missing))} of {len(plan.shards)} shards were missing"
    message = (
        f"--executor {executor} on {node} ended when {left} ({last_line[:300]}): see {log}, "
        "then repeat the command"
    )
    return message if process.returncode else ""


def _lost_sentence(plan: ShardPlan, missing: list[int]) -> str:
    begun = sorted(
        path.name.rsplit(".", 3)[0] for path in plan.folder.glob(f"incomplete/{missing[0]:06d}.*")
    )
    return (
        f"{len(missing)} shards are missing after {ROUNDS} rounds without a new one, first {plan.name(missing[0])}, "
        f"begun on node {begun[-1].partition('.')[2] if begun else 'none'}: its processes were killed, probably for "
        f"memory; use fewer --workers, then repeat the command to continue"
    )


def _join_shards(plan: ShardPlan) -> dict[str, Any]:
    prefix = plan.config.output_prefix
    states = [
        state
        for shard_index in range(len(plan.shards))
        if (state := plan.made(shard_index)) is not None
    ]
    assert len(states) == len(plan.shards), "the caller makes missing shards again"
    _name_repeated(plan, states)
    reports = [state.report for state in states]
    sums = {name: sum(getattr(report, name) for report in reports) for name in SUMS}
    if not sums["documents"]:
        raise UserError(
            f"the input {', '.join(map(str, plan.config.inputs))} holds no text: check --input"
        )
    index = Path(f"{prefix}.idx")
    files = [Path(f"{plan.prefix(shard_index)}.idx") for shard_index in range(len(states))]
    with refuse_unwritable(f"--output-prefix={prefix}", "free some space, then repeat the command"):
        with published_file(index) as aside:
            pairs = zip(files, reports, strict=True)
            write_index(
                aside,
                f"u{plan.token_bytes}",
                [DocumentLengths(file, HEADER.size, at.documents) for file, at in pairs],
            )
        plan.save(states, digests={".idx": digest(index)}, **sums)
    shutil.rmtree(plan.folder / "incomplete", ignore_errors=True)
    return strict_json.read(manifest_path(prefix))


def _name_repeated(plan: ShardPlan, states: list[WriterState]) -> None:
    """Report shards with the same content. They are kept, because small ones may be intended."""
    first: dict[str, int] = {}
    for index, state in enumerate(states):
        same = first.setdefault(state.facts["sha256"], index)
        if same != index and state.report.documents:
            text = f"{plan.name(index)} repeats {plan.name(same)}: remove one of them from --input"
            console().print(text, markup=False)


def _tokenizer_hash(encoder: DocumentEncoder) -> str:
    return hashlib.sha256(tokenizer_key(encoder.tokenizer).encode()).hexdigest()


class ShardedCorpus(IndexedDataset):
    """An ``IndexedDataset`` whose ``.bin`` is divided into shards."""

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *state: Any) -> None:
        """Open the index and the shards; unpickling also calls this."""
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        (
            self.object_storage_config,
            self.fast_cache_load,
            self.sequences_per_dataset,
            self.dtype_code,
        ) = state
        manifest = finished_manifest(path_prefix)
        assert manifest is not None
        tokens = [shard["report"]["tokens"] for shard in manifest["shards"]]
        self.bin_reader = ShardReader(
            path_prefix, np.cumsum(tokens, dtype=np.int64) * manifest["token_bytes"], mmap
        )
        self.index = _IndexReader(f"{path_prefix}.idx", multimodal)


class ShardReader(_BinReader):
    """Reads tokens by their position in the corpus. Each document is inside one shard."""

    def __init__(self, prefix: str, ends: np.ndarray, mmap: bool) -> None:
        self._prefix = prefix
        self._ends = ends
        self._mmap = mmap
        self._maps: dict[int, np.ndarray] = {}

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, offset, side="right"))
        offset -= int(self._ends[shard - 1]) if shard else 0
        path = f"{shard_prefix(self._prefix, shard)}.bin"
        if not self._mmap:
            return np.fromfile(path, dtype, count, offset=offset)
        if shard not in self._maps:
            self._maps[shard] = np.memmap(path, np.uint8, "r")
        return np.frombuffer(self._maps[shard], dtype, count, offset)
