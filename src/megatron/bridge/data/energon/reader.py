# SPDX-License-Identifier: Apache-2.0
"""The only module that imports Megatron Energon."""

import pickle
import re
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron import energon  # pyright: ignore[reportAttributeAccessIssue] - an optional package
from megatron.bridge.data.dataset_config import DatasetRequest
from megatron.bridge.data.finetuning.packing import pack, rounded_up
from megatron.bridge.data.finetuning.rows import Row, RowImages, make_row, with_images
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.formats import expect
from megatron.bridge.data.records.samples import EncodingReport, Sample
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.utils import strict_json, unpickling
from megatron.bridge.utils.errors import UserError, one_line

if TYPE_CHECKING:
    from megatron.bridge.data.energon.energon_config import EnergonProvider

EnergonSample = dict[str, Any]
JSON, TEXT = ("json", "jsonl"), ("txt", "text")
MEDIA = {
    "images": ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    "videos": ("mp4", "mkv", "webm", "mov", "avi"),
}
NAMING = (
    "image",
    "images",
    "image_url",
    "video",
    "videos",
    "video_url",
    "path",
    "url",
)  # keys of a record


def open_reader(
    config: "EnergonProvider",
    split: str,
    training: bool,
    request: DatasetRequest,
    readers: int,
    reader_index: int,
) -> "EnergonReader":
    """Open reader ``reader_index`` of ``readers`` on a split. Training data is shuffled and repeats."""
    worker = energon.WorkerConfig(
        rank=reader_index,
        world_size=readers,
        num_workers=config.num_workers,
        seed_offset=config.seed,
        global_error_handler=energon.reraise_exception,  # by default, Energon skips samples that fail
    )
    common: dict[str, Any] = {
        "split_part": split,
        "worker_config": worker,
        "batch_size": None,
        "packing_buffer_size": config.packing_buffer_size,
        "task_encoder": RecordTask(config, request),
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
        raise UserError(
            f"dataset.path={config.path}: the split {split} cannot be opened ({type(error).__name__}: "
            f"{one_line(error)}): check the names of splits"
        ) from error
    return EnergonReader(name, dataset)


class EnergonReader:
    """An endless iterator over the rows of one of Energon's loaders."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.report = EncodingReport()
        self._name = name
        in_this_process = dataset.worker_config.num_workers == 0
        loader: Any = energon.get_savable_loader(
            dataset,
            watchdog_timeout_seconds=None,
            # in this process, the run decides when garbage is collected
            **({"gc_collect_every_n_steps": 0} if in_this_process else {}),
        )
        loader.pin_memory = torch.cuda.is_available()
        loader.generator = (
            torch.Generator()
        )  # without it, the loader draws a seed from the run's own generator
        # The loader and its epoch iterator refer to each other; closing the latter breaks the cycle. The garbage
        # collector would close the queues to the workers first, so the loader could not tell the workers to end,
        # and would wait 5 s before killing each.
        weakref.finalize(self, lambda loader: iter(loader).close(), loader)
        self._loader = loader
        self._rows: Iterator[EnergonSample] | None = None

    def __next__(self) -> Row:
        sample = self._next() or self._next()
        if sample is None:
            raise UserError(
                f"{self._name} has a reader without samples: use fewer readers (dataset.readers), or more data"
            )
        if sample["problem"] is not None:
            raise UserError(sample["problem"])
        self.report.add(EncodingReport.from_dict(sample["report"]))
        return sample["row"]

    def _next(self) -> EnergonSample | None:
        """The next sample; None at the end of an epoch, after which the next epoch begins."""
        if self._rows is None:
            self._rows = iter(self._loader)
        try:
            return next(self._rows)
        except StopIteration:
            self._rows = None
            return None

    def state(self) -> bytes:
        """Energon's own state, which only Energon can read."""
        return pickle.dumps(self._loader.save_state_rank())

    def restore(self, state: bytes) -> None:
        assert self._rows is None, "restore before reading"
        self._loader.restore_state_rank(
            unpickling.read_states(state, "the position in Energon's data", "megatron.energon")
        )


class RecordTask(energon.DefaultTaskEncoder):
    """Converts records to rows in the process that reads them.

    A record that is wrong becomes a row with the field ``problem``: Energon would print the error, and a worker
    process would wrap it in its stack trace. Parts stay bytes until they are read here: Energon's own decoder would
    unpickle some.
    """

    decoder = None

    def __init__(self, config: "EnergonProvider", request: DatasetRequest) -> None:
        super().__init__()
        self.cookers = [energon.Cooker(_keep_sample)]
        self._config = config
        self._padding = request.tokenizer.eod
        self._encode = RecordEncoder(request.tokenizer, config.encoding_rules())
        if (media := self._encode.media) is not None:
            media.share = request.image_share
        self._unreported = EncodingReport()  # of records without samples

    @energon.stateless
    def encode_sample(self, sample: Any) -> Iterator[EnergonSample]:
        """The samples of a record; none if the rules drop it."""
        parts = sample if isinstance(sample, dict) else vars(sample)
        keys = energon.basic_sample_keys(parts)
        try:
            encoded = self._encode([_record_of_parts(parts)])
        except UserError as error:
            empty = EncodingReport().to_dict()
            yield keys | {
                "problem": str(error),
                "tokens": np.zeros(2, np.int32),
                "images": (),
                "report": empty,
            }
            return
        self._unreported.add(encoded.report)
        for encoded_sample in encoded.samples:
            report = self._unreported.to_dict()
            self._unreported = EncodingReport()
            content = (
                encoded_sample._asdict()
                if self._config.packed
                else {"row": self._row([encoded_sample])}
            )
            yield keys | {"problem": None, "report": report} | content

    def select_samples_to_pack(self, samples: list[EnergonSample]) -> list[list[EnergonSample]]:
        """Pack a buffer of samples by best-fit decreasing."""
        lengths = np.array([len(sample["tokens"]) - 1 for sample in samples])
        media = self._encode.media
        images = None
        if media is not None:
            images = [media.total_tokens(sample["images"]) for sample in samples]
        image_limit = (media.max_image_tokens if media else None) or sum(images or [0])
        rows = pack(
            rounded_up(lengths, self._config.sequence_multiple),
            self._config.seq_length,
            images,
            image_limit,
        )
        return [[samples[index] for index in row.tolist()] for row in rows]

    @energon.stateless
    def pack_selected_samples(self, samples: list[EnergonSample]) -> EnergonSample:
        """One row, or the first problem among its samples."""
        problem = next(
            (sample["problem"] for sample in samples if sample["problem"] is not None), None
        )
        row = None
        if problem is None:
            row = self._row(
                [
                    Sample(sample["tokens"], sample["trained"], sample["images"])
                    for sample in samples
                ]
            )
        report = EncodingReport()
        for sample in samples:
            report.add(EncodingReport.from_dict(sample["report"]))
        keys = {key: value for key, value in samples[0].items() if key.startswith("__")}
        return keys | {"problem": problem, "report": report.to_dict(), "row": row}

    def _row(self, samples: list[Sample]) -> Row:
        config = self._config
        seq_length = None if config.padding_free else config.seq_length
        row = make_row(
            samples, self._padding, config.sequence_multiple, seq_length, config.joins_samples
        )
        media = self._encode.media
        if media is None:
            return row
        row = with_images(row, samples, media)
        row_images: RowImages = row.pop("images")  # decoded in the process that reads
        return row if media.share is None else row | {"images": media.pixels(row_images.references)}


@energon.stateless
def _keep_sample(sample: Any) -> Any:
    return sample


def _record_of_parts(parts: dict[str, Any]) -> LocatedRecord:
    location = f"{parts.get('__shard__') or 'sample'}: {parts['__key__']}"
    for key in JSON:
        if key in parts:
            return location, _with_media(
                expect(_parse_json(parts[key], location), "an object", location, key), parts
            )
    for key in TEXT:
        if key in parts:
            return location, {"text": _decode_text(parts[key], location)}
    parts_of_sample = ", ".join(key for key in parts if not key.startswith("__")) or "none"
    raise UserError(
        f"{location}: the sample has no part json or txt (parts: {parts_of_sample}): add one of them"
    )


def _decode_text(part: Any, location: str) -> str:
    try:
        return part if isinstance(part, str) else part.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: the text is not UTF-8 ({error}): convert it") from error


def _parse_json(part: Any, location: str) -> Any:
    """Lines of a ``.jsonl`` file are parsed already."""
    if not isinstance(part, bytes | str):
        return part
    try:
        return strict_json.loads(_decode_text(part, location))
    except ValueError as error:
        raise UserError(
            f"{location}: the part json is not valid JSON ({error}): write it again"
        ) from error


def _with_media(record: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """``record`` with the bytes of images and videos instead of the names of their parts."""
    names_by_kind = {
        kind: sorted(
            (name for name in parts if name.rpartition(".")[2].lower() in endings), key=_by_number
        )
        for kind, endings in MEDIA.items()
    }
    named = _fill_in_media(
        record, {name: parts[name] for names in names_by_kind.values() for name in names}
    )
    if named != record:
        return named
    listed = {
        kind: [{"bytes": parts[name]} for name in names]
        for kind, names in names_by_kind.items()
        if names
    }
    return listed | record


def _by_number(name: str) -> list[Any]:
    """``10.jpg`` comes after ``9.jpg``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _fill_in_media(value: Any, media: dict[str, bytes], key: str = "") -> Any:
    if isinstance(value, list):
        return [_fill_in_media(item, media, key) for item in value]
    if isinstance(value, dict):
        return {name: _fill_in_media(item, media, name) for name, item in value.items()}
    return {"bytes": media[value]} if key in NAMING and value in media else value
