# SPDX-License-Identifier: Apache-2.0
"""The one module that imports Megatron Energon."""

import pickle
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron import energon  # pyright: ignore[reportAttributeAccessIssue] - an optional package
from megatron.bridge.data.encoding import Encoder
from megatron.bridge.data.examples import Example, Report
from megatron.bridge.data.finetuning import encoding_rules
from megatron.bridge.data.packing import pack, rounded_up
from megatron.bridge.data.rows import Row, row_of
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.energon import EnergonProvider

Sample = dict[str, Any]
JSON, TEXT = ("json", "jsonl"), ("txt", "text")


def open_reader(
    config: "EnergonProvider", split: str, training: bool, tokenizer: Tokenizer, readers: int, number: int
) -> "EnergonReader":
    """Reader ``number`` of ``readers`` on a part of the data; training data repeats in an order of its own."""
    worker = energon.WorkerConfig(
        rank=number,
        world_size=readers,
        num_workers=config.num_workers,
        seed_offset=config.seed,
        global_error_handler=energon.reraise_exception,  # by default, samples that fail are left out
    )
    common: dict[str, Any] = {
        "split_part": split,
        "worker_config": worker,
        "batch_size": None,
        "packing_buffer_size": config.packing_buffer_size,
        "task_encoder": RecordTask(config, tokenizer),
    }
    name = f"{config.path} ({split})"
    try:
        if not training:
            return EnergonReader(name, energon.get_val_dataset(config.path, **common))
        dataset = energon.get_train_dataset(
            config.path,
            shuffle_buffer_size=config.shuffle_buffer_size,
            max_samples_per_sequence=config.max_samples_per_sequence,
            **common,
        )
    except (OSError, ValueError, KeyError, AssertionError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"dataset.path={config.path}: the part {split} cannot be opened ({reason})") from error
    return EnergonReader(name, dataset)


class EnergonReader:
    """Rows of one of Energon's loaders, without end."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.report = Report()
        self._name = name
        reads_ahead = dataset.worker_config.num_workers > 0
        loader: Any = energon.get_savable_loader(
            dataset,
            watchdog_timeout_seconds=None,
            # in this process, garbage is collected by the run
            **({} if reads_ahead else {"gc_collect_every_n_steps": 0}),
        )
        loader.pin_memory = torch.cuda.is_available()
        loader.generator = torch.Generator()  # else it draws a seed from the run's own random numbers
        # The loader and its pass know each other. The garbage collector first closes the queues to the workers, so
        # that the loader could not tell these to end, and would wait 5 s before it kills each.
        weakref.finalize(self, _end_pass, loader)
        self._loader = loader
        self._rows: Iterator[Sample] | None = None

    def __next__(self) -> Row:
        sample = self._next() or self._next()
        if sample is None:
            raise UserError(
                f"{self._name} has a reader without a sample: use fewer readers (dataset.readers), or more data"
            )
        if sample["problem"] is not None:
            raise UserError(sample["problem"])
        self.report.add(Report.from_dict(sample["report"]))
        return sample["row"]

    def _next(self) -> Sample | None:
        """The next sample; None at the end of a pass, after which another one begins."""
        if self._rows is None:
            self._rows = iter(self._loader)
        try:
            return next(self._rows)
        except StopIteration:
            self._rows = None
            return None

    def state(self) -> bytes:
        """Energon's own state: it is read only by whoever has Energon."""
        return pickle.dumps(self._loader.save_state_rank())

    def restore(self, state: bytes) -> None:
        """Go on where ``state`` was taken."""
        assert self._rows is None, "something was read"
        self._loader.restore_state_rank(pickle.loads(state))


def _end_pass(loader: Any) -> None:
    """Make the loader let go of itself."""
    iter(loader).close()


class RecordTask(energon.DefaultTaskEncoder):
    """Records to rows, in the process that reads them.

    What is wrong with a record travels as a row of its own: Energon would print it, and a worker process would
    wrap it in its stack.
    """

    def __init__(self, config: "EnergonProvider", tokenizer: Tokenizer) -> None:
        super().__init__()
        self.cookers = [energon.Cooker(_uncooked)]
        self._config = config
        self._padding = tokenizer.eod
        self._encode = Encoder(tokenizer, encoding_rules(config))
        self._untold = Report()  # of records that left no sample

    @energon.stateless
    def encode_sample(self, sample: Any) -> Iterator[Sample]:
        """The samples of a record; none if the rules drop it."""
        parts = sample if isinstance(sample, dict) else vars(sample)
        keys = energon.basic_sample_keys(parts)
        try:
            encoded = self._encode([_numbered(parts)])
        except UserError as error:
            yield keys | {"problem": str(error), "tokens": np.zeros(2, np.int32), "report": Report().to_dict()}
            return
        self._untold.add(encoded.report)
        for example in encoded.examples:
            report, self._untold = self._untold.to_dict(), Report()
            content = example._asdict() if self._config.packed else {"row": self._row([example])}
            yield keys | {"problem": None, "report": report} | content

    def select_samples_to_pack(self, samples: list[Sample]) -> list[list[Sample]]:
        """Best-fit decreasing, over a buffer."""
        lengths = np.array([len(sample["tokens"]) - 1 for sample in samples])
        rows = pack(rounded_up(lengths, self._config.sequence_multiple), self._config.seq_length)
        return [[samples[place] for place in row.tolist()] for row in rows]

    @energon.stateless
    def pack_selected_samples(self, samples: list[Sample]) -> Sample:
        """One row, or the first problem among its samples."""
        first, report = samples[0], Report()
        problem = next((sample["problem"] for sample in samples if sample["problem"] is not None), None)
        if problem is None:
            row = self._row([Example(sample["tokens"], sample["trained"]) for sample in samples])
        else:
            row = None
        for sample in samples:
            report.add(Report.from_dict(sample["report"]))
        keys = {key: value for key, value in first.items() if key.startswith("__")}
        return keys | {"problem": problem, "report": report.to_dict(), "row": row}

    def _row(self, examples: list[Example]) -> Row:
        config = self._config
        return row_of(
            examples,
            self._padding,
            config.sequence_multiple,
            None if config.padding_free else config.seq_length,
            packed=config.joins_samples,
        )


@energon.stateless
def _uncooked(sample: Any) -> Any:
    """A sample of parts as it is."""
    return sample


def _numbered(parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where a sample stands, and its record."""
    where = f"{parts.get('__shard__') or 'sample'}: {parts['__key__']}"
    for key in JSON:
        if key in parts:
            if not isinstance(parts[key], dict):
                raise UserError(f"{where}: {key} must hold an object, not {type(parts[key]).__name__}")
            return where, parts[key]
    for key in TEXT:
        if key in parts:
            return where, {"text": parts[key]}
    found = ", ".join(key for key in parts if not key.startswith("__")) or "none"
    raise UserError(f"{where}: the sample has no part json or txt (parts: {found})")
