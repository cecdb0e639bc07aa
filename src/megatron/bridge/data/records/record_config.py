# SPDX-License-Identifier: Apache-2.0
"""The config of datasets of records: how records become samples, and samples become rows."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from megatron.bridge.data.dataset_config import DatasetConfig, too_small, unknown
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.records.chat_template import TrainOn, template_text
from megatron.bridge.utils.config.ranges import SEED

TrainOnEOS = Literal["turn", "all", "last"]
Truncation = Literal["refuse", "drop", "right", "left", "keep_answer"]
ProcessExample = Callable[..., dict[str, Any] | None]


@dataclass(frozen=True)
class EncodingRules:
    """How records become samples. The field names are part of the key of prepared samples."""

    max_tokens: int
    """Maximum length of a sample: one token more than a row holds, because the last one is only a target."""
    truncation: Truncation = "refuse"
    train_on: TrainOn = "assistant"
    train_on_eos: TrainOnEOS | None = None
    split_turns: bool = False
    chat_template: str | None = None
    """Template to use instead of the tokenizer's."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    process_example_fn: ProcessExample | None = None
    media: MediaRules | None = None
    """How images are processed. None refuses records with images."""

    def extended[Rules: EncodingRules](self, kind: type[Rules], **values: Any) -> Rules:
        """Copy these rules to the subclass ``kind``; ``values`` add or replace fields."""
        return kind(
            **{**{entry.name: getattr(self, entry.name) for entry in fields(self)}, **values}
        )


@dataclass(kw_only=True)
class PackedSequenceSpecs:
    """How several samples share a row."""

    packed_sequence_size: int = -1
    """Length of a row: ``dataset.seq_length``, or -1 for one sample in each row."""
    pad_seq_to_mult: int | None = None
    """Pad each sample to a multiple of this. None derives it from the layout: twice the context-parallel size, or
    1 without context parallelism."""


@dataclass(kw_only=True)
class RecordDatasetConfig(DatasetConfig):
    """Records of any source.

    A record is a conversation (``messages`` in OpenAI's format or ``conversations`` in ShareGPT's, optionally with
    ``tools``), ``prompt`` and ``completion`` (texts, or lists of messages), ``input`` and ``output``, or ``text``.
    The loss covers the completion and the end-of-document token of a pair, all of a ``text``, and the part of a
    conversation that ``train_on`` selects.
    """

    read_ahead: ClassVar[bool] = True
    masks_tokens: ClassVar[bool] = True

    seed: Annotated[int, SEED] = 1234
    """Seed of the training order, which changes every epoch."""
    truncation: Truncation = "refuse"
    """Policy for a sample with more than ``seq_length`` tokens: ``refuse`` stops the run, ``drop`` drops the sample,
    ``right`` and ``left`` truncate that end, and ``keep_answer`` truncates the tokens before the last answer. A
    sample that keeps no token in the loss is dropped. The run counts and reports all these samples."""
    train_on: TrainOn = "assistant"
    """Which part of a conversation is in the loss: every message of the ``assistant``, the ``last`` one, the
    ``completion`` (all answers after the last user message), or ``everything``, including prompts. Messages with
    ``weight`` 0 are left out."""
    train_on_eos: TrainOnEOS | None = None
    """Which tokens that end turns are in the loss, in conversations: ``turn`` adds the one right after each answer in
    the loss, for templates that leave it out; ``all`` adds every one, after questions, too; ``last`` is the last one
    of a sample alone. None takes an answer as the template writes it, which usually includes its end."""
    split_turns: bool = False
    """Make one sample of each answer and the messages before it. This is for templates that render earlier answers
    differently from the last one, such as templates of reasoning models."""
    chat_template: str | None = None
    """File with a Jinja template, or the template itself, to use instead of the tokenizer's template."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``{"enable_thinking": False}``."""
    process_example_fn: ProcessExample | None = None
    """Function that converts a record to one of the formats above, or returns None to drop the record. If it has two
    parameters, the second one is the tokenizer."""
    packed_sequence_specs: PackedSequenceSpecs | None = None
    """Pack several samples into a row; each has its own attention and positions."""
    padding_free: bool = False
    """Concatenate the samples of a microbatch into one row without padding."""
    hf_processor_path: str | None = None
    """Directory or hub id of the vision-language model whose image processor is used. None stands for
    ``tokenizer.tokenizer_model`` if the model has a vision tower."""
    media_root: str | None = None
    """Folder of all images: paths are relative to it and may not leave it. None stands for the folder of the
    data."""
    min_pixels: int | None = None
    """Enlarge images with fewer pixels than this. None uses the limit of the image processor."""
    max_pixels: int | None = None
    """Shrink images with more pixels than this, so that they have fewer tokens. None uses the limit of the image
    processor."""
    max_image_tokens: int | None = None
    """Maximum number of image tokens of a sample or a packed row, which bounds the memory of the vision tower. A
    sample with more is treated like a sample that is too long. None stands for ``seq_length``."""
    fetch_urls: bool = False
    """Download images and videos whose records have a URL (http, https), once, into ``.fetched`` below
    ``media_root``. A record can then make this machine send requests to any address that the machine reaches."""
    fps: float | None = None
    """Number of frames to use per second of a video. None uses the rate of the video processor."""
    max_frames: int | None = None
    """Maximum number of frames to use of a video. None uses the limit of the video processor."""

    def _eos_problems(self) -> list[str]:
        if self.train_on_eos is None:
            return []
        return list(unknown(self, "train_on_eos", get_args(TrainOnEOS)))

    @property
    def shuffle_seed(self) -> int:
        return self.seed

    @property
    def packed(self) -> bool:
        return (
            self.packed_sequence_specs is not None
            and self.packed_sequence_specs.packed_sequence_size > 0
        )

    @property
    def joins_samples(self) -> bool:
        return self.packed or self.padding_free

    @property
    def sequence_multiple(self) -> int:
        """Return the number to whose multiple each sample of a packed row is padded."""
        specs = self.packed_sequence_specs
        return (specs.pad_seq_to_mult if specs else None) or 1

    def encoding_rules(self) -> EncodingRules:
        """Return the rules that convert records to samples.

        Raises:
            UserError: the chat template cannot be read.
        """
        multiple = self.sequence_multiple
        return EncodingRules(
            max_tokens=self.seq_length // multiple * multiple + 1,
            truncation=self.truncation,
            train_on=self.train_on,
            train_on_eos=self.train_on_eos,
            split_turns=self.split_turns,
            chat_template=template_text(self.chat_template),
            chat_template_options=self.chat_template_options,
            process_example_fn=self.process_example_fn,
            media=self.media_rules(),
        )

    @property
    def media_folder(self) -> str:
        """Return the folder to which the paths of images are relative."""
        return self.media_root or "."

    def media_rules(self) -> MediaRules | None:
        """Return the rules for images, or None if the config has no image processor."""
        if self.hf_processor_path is None:
            return None
        limits = (
            self.min_pixels,
            self.max_pixels,
            self.max_image_tokens,
            self.fetch_urls,
            self.fps,
            self.max_frames,
        )
        return MediaRules(self.hf_processor_path, self.media_folder, *limits)

    def problems(self) -> list[str]:
        problems = [
            *super().problems(),
            *unknown(self, "truncation", get_args(Truncation)),
            *unknown(self, "train_on", get_args(TrainOn)),
            *self._eos_problems(),
            *too_small(self, "min_pixels", "max_pixels", "max_image_tokens", "max_frames"),
        ]
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            problems.append(
                f"dataset.min_pixels={self.min_pixels} is more than dataset.max_pixels={self.max_pixels}: change "
                "one of them"
            )
        if self.fps is not None and not 0 < self.fps <= 1000:
            problems.append(
                f"dataset.fps={self.fps}: choose a number of frames per second above 0, at most 1000"
            )
        if self.split_turns and self.train_on != "assistant":
            problems.append(
                f"dataset.split_turns=True trains on one answer of each sample, so "
                f"dataset.train_on={self.train_on} has no effect: remove one of them"
            )
        return (
            problems
            if self.packed_sequence_specs is None
            else [*problems, *self._packing_problems()]
        )

    def _packing_problems(self) -> list[str]:
        assert self.packed_sequence_specs is not None
        problems = []
        name = "dataset.packed_sequence_specs"
        size = self.packed_sequence_specs.packed_sequence_size
        multiple = self.sequence_multiple
        if self.packed and self.padding_free:
            problems.append(
                "dataset.padding_free=True concatenates samples instead of packing them: remove one of the two"
            )
        if self.packed and size != self.seq_length:
            problems.append(
                f"{name}.packed_sequence_size={size} differs from dataset.seq_length={self.seq_length}: set both "
                f"to one value, because packed rows have the length of other rows"
            )
        if not self.packed and size != -1:
            problems.append(
                f"{name}.packed_sequence_size={size}: set it to dataset.seq_length, or to -1 for no packing"
            )
        if multiple < 1 or self.seq_length % multiple:
            problems.append(
                f"{name}.pad_seq_to_mult={multiple} does not divide dataset.seq_length={self.seq_length}: choose "
                f"another value"
            )
        return problems
