# SPDX-License-Identifier: Apache-2.0
"""Convert records to tokenized samples, and count the dropped, truncated and unusual ones."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.bridge.data.media.processing import load_media_processor
from megatron.bridge.data.media.processor import MediaProcessor
from megatron.bridge.data.media.references import AudioReference, MediaReference, VideoReference
from megatron.bridge.data.records.chat_template import ChatTemplate, RenderedChat
from megatron.bridge.data.records.end_tokens import end_of_turn, end_tokens
from megatron.bridge.data.records.formats import (
    INSTEAD_OF_CONTENT,
    Chat,
    ParsedRecord,
    PromptCompletion,
    Text,
    parse,
    unused_keys,
)
from megatron.bridge.data.records.media_parts import MARKS, text_of
from megatron.bridge.data.records.record_config import (
    EncodingRules,
    ProcessExample,
)
from megatron.bridge.data.records.samples import EncodingReport, Sample, Samples
from megatron.bridge.data.records.sources import LocatedRecord, TableRow, without_filled_nulls
from megatron.bridge.data.records.truncation import shorten
from megatron.bridge.data.records.turn_endings import TurnEndings
from megatron.bridge.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    bos_token,
    encode_many,
    encode_with_offsets,
)
from megatron.bridge.utils import storage
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.user_functions import (
    check_call,
    failure_of,
    function_name,
    positional_parameters,
)

if TYPE_CHECKING:
    pass


# reasons to drop a sample
NO_TARGET = "without a token in the loss"
TOO_LONG = "as too long"
TOO_MANY_IMAGES = (
    "because their images or recordings have more tokens than dataset.max_image_tokens"
)
BY_FUNCTION = "by process_example_fn"
PROCESS_KEY = "dataset.process_example_fn"
# notes on samples that are kept
INSIDE_A_TOKEN = "answers begin or end inside a token, all of which is in the loss"
NO_END = (
    "answers do not end with a token that ends generation: the model does not learn to stop there; "
    "dataset.train_on_eos=turn puts one that follows an answer into the loss"
)
EMPTY = "answers are empty: the model learns to stop at once"
SYSTEMS = "conversations have several system messages"
UNUSED = "fields that the chat template does not render: {}"
UNUSED_KEYS = "records have keys that are not used: {}"
FILLED = (
    "rows have nulls in tools or tool calls, where a table cannot say that a key is absent: they "
    "are left out; a column of JSON strings keeps nulls"
)
CONTROL = "messages contain a special token as text: the model takes it for one of the template"
NO_IMAGE = (
    f"messages contain {' or '.join(MARKS.values())} as text, in records without any: "
    "the model sees nothing there"
)
MOSTLY_IMAGES = (
    "samples consist of images by more than half: dataset.max_pixels makes images smaller"
)


class EncodedRecords(NamedTuple):
    """The samples of some records, and a report on the other records."""

    samples: Samples
    report: EncodingReport


class EncodedRecord(NamedTuple):
    """A sample before truncation, and the place of its record (file and line)."""

    where: str
    sample: Sample


class RecordEncoder:
    def __init__(self, tokenizer: Tokenizer, rules: EncodingRules) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._process = _with_tokenizer(rules.process_example_fn, tokenizer)
        self._template: ChatTemplate | None = None
        self.media = media_processor(tokenizer, rules)
        self._opening = bos_token(tokenizer)
        self._special_tokens = _special_tokens(tokenizer)

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        report = EncodingReport(records=len(records))
        drafts = [draft for draft in self._drafts(records, report) if self._keep(draft, report)]
        cut = [self._truncate(draft.sample, report, draft.where) for draft in drafts]
        trained_samples = [sample for sample in cut if sample.trained.any()]
        for draft, sample in zip(drafts, cut, strict=True):
            if not sample.trained.any():
                report.drop(NO_TARGET, draft.where)
        samples = Samples.of(trained_samples)
        report.samples = len(trained_samples)
        report.tokens = len(samples.tokens)
        report.trained = int(samples.trained.sum())
        self._count_images(trained_samples, report)
        report.notes = +report.notes  # + removes counts of 0
        return EncodedRecords(samples, report)

    def _drafts(
        self, records: Sequence[LocatedRecord], report: EncodingReport
    ) -> Iterator[EncodedRecord]:
        """Tokenize all records in one call, which is several times as fast as one call per record."""
        parsed = list(self._parse(records, report))
        chats = self._chats(
            [
                self._render(location, item, report)
                for location, item in parsed
                if isinstance(item, Chat)
            ],
            report,
        )
        plain = self._plain([item for _, item in parsed if not isinstance(item, Chat)])
        for location, item in parsed:
            yield EncodedRecord(location, next(chats if isinstance(item, Chat) else plain))

    def _processed(
        self, records: Sequence[LocatedRecord], report: EncodingReport
    ) -> Iterator[LocatedRecord]:
        for location, row in records:
            record = row
            if isinstance(row, TableRow):
                record = without_filled_nulls(row)
                report.notes[FILLED] += record != row
            processed = record if self._process is None else self._process_record(record, location)
            if processed is None:
                report.drop(BY_FUNCTION, location)
            else:
                yield location, processed

    def _process_record(self, record: Any, where: str) -> dict[str, Any] | None:
        """Call the user's function; its own error is one sentence with the record and the line of code."""
        function = self.rules.process_example_fn
        process = self._process
        assert process is not None
        try:
            processed = process(record)
        except UserError:
            raise
        except Exception as error:
            raise failure_of(PROCESS_KEY, function, error, where) from error
        if processed is not None and not isinstance(processed, dict):
            raise UserError(
                f"{where}: {PROCESS_KEY}={function_name(function)} returns a {type(processed).__name__}: return a "
                "record, which is a dict, or None to drop it"
            )
        return processed

    def _parse(
        self, records: Sequence[LocatedRecord], report: EncodingReport
    ) -> Iterator[tuple[str, ParsedRecord]]:
        for location, record in self._processed(records, report):
            parsed = parse(record, location)
            report.formats[type(parsed).__name__] += 1
            if unused := unused_keys(record, parsed):
                report.notes[UNUSED_KEYS.format(", ".join(unused))] += 1
            self._note(parsed, report)
            for item in self._turns(parsed):
                yield location, item

    def _turns(self, parsed: ParsedRecord) -> Iterator[ParsedRecord]:
        """Split a conversation into one item per answer, with the messages before it, if ``split_turns`` is set."""
        if not (self.rules.split_turns and isinstance(parsed, Chat)):
            yield parsed
            return
        for index in parsed.answers:
            if index not in parsed.excluded:
                earlier_images = tuple(image for image in parsed.images if image.message <= index)
                yield replace(
                    parsed,
                    messages=parsed.messages[: index + 1],
                    completion=None,
                    images=earlier_images,
                )

    def _plain(self, parsed: Sequence[PromptCompletion | Text]) -> Iterator[Sample]:
        """Tokenize prompts, completions and texts, each ended by the end-of-document token.

        Prompt and completion are tokenized separately. In one text, the last character of a prompt could share a
        token with the first of its completion, which inference never sees: it tokenizes the prompt alone.
        """
        first = [
            item.prompt if isinstance(item, PromptCompletion) else item.text for item in parsed
        ]
        rest = [item.completion for item in parsed if isinstance(item, PromptCompletion)]
        beginnings = encode_many(self.tokenizer, first, "beginning")
        completions = iter(encode_many(self.tokenizer, rest, "continuation"))
        for item, beginning in zip(parsed, beginnings, strict=True):
            pair = isinstance(item, PromptCompletion)
            ids = self._close([*beginning, *(next(completions) if pair else ())])
            first_trained = len(beginning) if pair and self.rules.train_on != "everything" else 1
            yield Sample(np.array(ids, np.int32), np.arange(len(ids)) >= max(first_trained, 1))

    def _close(self, ids: list[int]) -> list[int]:
        """Add the end-of-document token, unless the text ends with it."""
        return ids if ids[-1:] == [self.tokenizer.eod] else [*ids, self.tokenizer.eod]

    @property
    def template(self) -> ChatTemplate:
        """The chat template, created with the first conversation."""
        if self._template is None:
            if (
                not isinstance(self.tokenizer, HuggingFaceTokenizer)
                or not self.tokenizer.hf.is_fast
            ):
                raise UserError(
                    "conversations need a tokenizer that maps tokens to characters (a fast Hugging Face "
                    "tokenizer): convert the tokenizer, or use prompt and completion"
                )
            template = self.rules.chat_template or (
                self.media.chat_template if self.media else None
            )
            self._template = ChatTemplate(
                self.tokenizer.hf,
                template,
                self.rules.chat_template_options,
                self.media is not None,
            )
        return self._template

    @cached_property
    def _end_tokens(self) -> frozenset[int]:
        """The tokens at which the model stops in chats."""
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        hf = self.tokenizer.hf
        template = self.template
        folder = storage.local(self.tokenizer.path).expanduser()
        ends = end_tokens(hf, folder if folder.is_dir() else None)
        return ends | end_of_turn(hf, template.template, parts=template.parts)

    def _render(self, location: str, chat: Chat, report: EncodingReport) -> RenderedChat:
        if self.media is None and chat.images:
            raise UserError(
                f"{location}: the record has images, videos or audio, and the model has no processor for them: "
                f"train a vision-language or audio model, or set dataset.hf_processor_path to the directory of one"
            )
        train_on = "last" if self.rules.split_turns else self.rules.train_on
        rendered = self.template.render(chat, train_on, location)
        report.notes.update(UNUSED.format(name) for name in rendered.unused)
        if self.media is None:
            return rendered
        images = self.media.references(((item.kind, item.raw) for item in chat.images), location)
        return expand(rendered, images, self.media, location)

    def _note(self, parsed: ParsedRecord, report: EncodingReport) -> None:
        """Count properties of records that are rarely intended."""
        if isinstance(parsed, PromptCompletion):
            report.notes[EMPTY] += not parsed.completion
        if not isinstance(parsed, Chat):
            return
        messages = parsed.messages
        report.notes[SYSTEMS] += (
            sum(message["role"] in ("system", "developer") for message in messages) > 1
        )
        if (pattern := self._special_tokens) is not None:
            report.notes[CONTROL] += sum(
                bool(pattern.search(text_of(message["content"]))) for message in messages
            )
        if not parsed.images:
            report.notes[NO_IMAGE] += sum(
                any(mark in text_of(message["content"]) for mark in MARKS.values())
                for message in messages
            )
        trained = [messages[index] for index in parsed.answers if index not in parsed.excluded]
        report.notes[EMPTY] += sum(
            not text_of(message["content"])
            and not any(message.get(key) for key in INSTEAD_OF_CONTENT)
            for message in trained
        )

    def _chats(self, rendered: list[RenderedChat], report: EncodingReport) -> Iterator[Sample]:
        if not rendered:
            return
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        endings = TurnEndings(self.tokenizer.hf, self._end_tokens)
        encoded = encode_with_offsets(self.tokenizer.hf, [chat.text for chat in rendered])
        for chat, (tokens, offsets) in zip(rendered, encoded, strict=True):
            ids = np.array(tokens, dtype=np.int32)
            starts, ends = coverage(np.array(offsets, dtype=np.int64).reshape(-1, 2))
            trained = np.zeros(len(ids), dtype=np.bool_)
            for first, last in chat.spans:
                inside = (ends > first) & (starts < last)
                trained |= inside
                straddling = ((starts < first) & (ends > first)) | ((starts < last) & (ends > last))
                report.notes[INSIDE_A_TOKEN] += int(straddling.any())
                if self.rules.train_on_eos is not None:
                    inside |= endings.after(ids, inside)
                    trained |= inside
                report.notes[NO_END] += not endings.end(ids[inside])
            trained = endings.choose(ids, trained, self.rules.train_on_eos)
            trained[:1] = False
            if self.media is not None:
                trained &= ~np.isin(ids, self.media.token_ids)  # the loss leaves out placeholders
                self._check_count(ids, chat)
            yield Sample(ids, trained, chat.images)

    def _keep(self, draft: EncodedRecord, report: EncodingReport) -> bool:
        image_limit = self.media.max_image_tokens if self.media else None
        if image_limit is not None and self._image_tokens(draft.sample) > image_limit:
            return self._keep_images(draft, report, image_limit)
        length = len(draft.sample.tokens)
        limit = self.rules.max_tokens
        if length <= limit:
            return True
        if self.rules.truncation == "refuse":
            raise UserError(
                f"{draft.where}: the sample has {length - 1} tokens, more than dataset.seq_length={limit - 1}: "
                f"increase it, or set dataset.truncation to drop, right, left or keep_answer"
            )
        if self.rules.truncation != "drop":
            return True
        report.drop(TOO_LONG, draft.where)
        return False

    def _keep_images(self, draft: EncodedRecord, report: EncodingReport, image_limit: int) -> bool:
        """Drop or refuse a sample with too many image tokens."""
        if self.rules.truncation == "drop":
            report.drop(TOO_MANY_IMAGES, draft.where)
            return False
        raise UserError(
            f"{draft.where}: the images or recordings of the sample have {self._image_tokens(draft.sample)} tokens, "
            f"more than dataset.max_image_tokens={image_limit}: increase it, set dataset.max_pixels to a smaller "
            "value (of images), or dataset.truncation to drop"
        )

    def _image_tokens(self, sample: Sample) -> int:
        return 0 if self.media is None else self.media.total_tokens(sample.images)

    def _check_count(self, ids: np.ndarray, chat: RenderedChat) -> None:
        """Refuse a tokenizer that splits placeholders, or text that contains them."""
        assert self.media is not None
        placeholders = int(np.isin(ids, self.media.token_ids).sum())
        image_tokens = self.media.total_tokens(chat.images)
        if placeholders != image_tokens:
            location = chat.images[0].where if chat.images else "a record without images"
            raise UserError(
                f"{location}: the sample has {placeholders} placeholders "
                f"{self.media.token} for {image_tokens} tokens "
                "of images, videos or audio: remove the placeholder from the text, or use the model's own tokenizer"
            )

    def _count_images(self, samples: list[Sample], report: EncodingReport) -> None:
        if self.media is None:
            return
        for sample in samples:
            tokens = self._image_tokens(sample)
            videos = sum(isinstance(item, VideoReference) for item in sample.images)
            recordings = sum(isinstance(item, AudioReference) for item in sample.images)
            report.images += len(sample.images) - videos - recordings
            report.videos += videos
            report.recordings += recordings
            report.image_tokens += tokens
            report.notes[MOSTLY_IMAGES] += not recordings and 2 * tokens > len(sample.tokens)

    def _truncate(self, sample: Sample, report: EncodingReport, location: str) -> Sample:
        if len(sample.tokens) <= self.rules.max_tokens:
            return sample
        if sample.images:
            raise UserError(
                f"{location}: the sample has images or audio and {len(sample.tokens) - 1} tokens, more than "
                f"dataset.seq_length={self.rules.max_tokens - 1}, which cannot be truncated: set "
                "dataset.truncation to drop, dataset.max_pixels to a smaller value (of images), or "
                "dataset.seq_length to a larger one"
            )
        report.cut += 1
        return shorten(sample, self.rules.max_tokens, self.rules.truncation, self._opening)


def media_processor(tokenizer: Tokenizer, rules: EncodingRules) -> MediaProcessor | None:
    """Return the processor of images or audio that ``rules`` name, or None if they name none."""
    if rules.media is None:
        return None
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"dataset.hf_processor_path={rules.media.processor_path} needs the tokenizer of that model: set "
            "tokenizer.tokenizer_type=HuggingFaceTokenizer"
        )
    return load_media_processor(rules.media, tokenizer.hf)


def coverage(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first character and the end of each token, without gaps between tokens.

    Tokenizers may leave white space out of the offsets of a token; it then belongs to the next token. If tokens
    share a character of several bytes, all of them cover it.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    before = np.concatenate(([0], ends[:-1]))[: len(ends)]
    return np.minimum(before, offsets[:, 0]), ends


def _special_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    special = [
        token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special
    ]
    return re.compile("|".join(map(re.escape, special))) if special else None


def _with_tokenizer(function: ProcessExample | None, tokenizer: Tokenizer) -> ProcessExample | None:
    """Return ``function`` with one parameter; its second parameter, if any, is bound to transformers' tokenizer."""
    if function is None:
        return None
    usage = "function(record), or function(record, tokenizer)"
    arguments = min(len(positional_parameters(PROCESS_KEY, function, usage)), 2) or 1
    check_call(PROCESS_KEY, function, arguments, usage)
    if arguments < 2:
        return function
    given = tokenizer.hf if isinstance(tokenizer, HuggingFaceTokenizer) else tokenizer
    return lambda record: function(record, given)


def expand(
    rendered: RenderedChat, images: Sequence[MediaReference], media: MediaProcessor, location: str
) -> RenderedChat:
    """Replace the placeholder of each image, video or recording in ``rendered`` by its text, and shift the spans."""
    expected_marks = [media.placeholder(image) for image in images]
    marks = dict.fromkeys((media.placeholder(), *expected_marks))
    # pieces with odd indices are placeholders
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", rendered.text)
    rendered_marks = pieces[1::2]
    if rendered_marks != expected_marks:
        raise UserError(
            f"{location}: the rendered conversation has {len(rendered_marks)} placeholders "
            f"{' or '.join(marks)} for {len(expected_marks)} images, videos or recordings: the chat template must "
            "write one for each in their order, and no text may contain it"
        )
    if not images:
        return rendered
    ends = list(accumulate(map(len, pieces)))[1::2]
    pieces[1::2] = texts = [media.text(image) for image in images]
    shifts = [
        0,
        *accumulate(
            len(text) - len(mark) for text, mark in zip(texts, expected_marks, strict=True)
        ),
    ]

    def moved(position: int) -> int:
        return position + shifts[bisect_right(ends, position)]

    spans = [(moved(first), moved(last)) for first, last in rendered.spans]
    return replace(rendered, text="".join(pieces), spans=spans, images=tuple(images))
