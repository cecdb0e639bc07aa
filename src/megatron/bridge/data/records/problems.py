# SPDX-License-Identifier: Apache-2.0
"""All mistakes in the records of a run, after the first one has stopped it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.data.records.jsonl import skip_unreadable_records
from megatron.bridge.data.records.sources import LocatedRecord, RecordSource
from megatron.bridge.utils.errors import UserError, first_few

EXAMINED_RECORDS = 20_000  # of a source: about ten seconds of work
_MOST_PROBLEMS = 1_000  # a file with more is not repaired by hand
_SHOWN_KINDS = 12
_PLACE = re.compile(r"^(.+?(?::\d+|: (?:row|record) \d+)): (.*)$", re.DOTALL)
# what differs between two sentences about the same mistake
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+|(?<==)\S+")


@dataclass
class _Kind:
    """Sentences that differ in their place and in values only."""

    sentence: str  # the first one, in full
    other_places: list[str] = field(default_factory=list[str])

    def text(self) -> str:
        if not self.other_places:
            return self.sentence
        first = _PLACE.match(self.sentence)
        file = first.group(1).rpartition(":")[0] if first else ""
        # the lines of the same file are given by their numbers
        places = [location.removeprefix(f"{file}:").strip() for location in self.other_places]
        return f"{self.sentence} (the same at {first_few(places)})"


def find_problems(
    source: RecordSource, encode: Callable[[Sequence[LocatedRecord]], Any]
) -> list[str]:
    """Return a sentence for each mistake in the first records of ``source``, in their order."""
    sentences: list[str] = []
    with skip_unreadable_records() as unreadable:
        for index, record in enumerate(source.records()):
            sentences += unreadable
            unreadable.clear()
            if index >= EXAMINED_RECORDS or len(sentences) >= _MOST_PROBLEMS:
                return sentences
            try:
                encode([record])
            except UserError as error:
                sentences.append(str(error))
        return [*sentences, *unreadable]


def join_problems(sentences: Sequence[str]) -> str:
    """Return the mistakes, a line for each kind, with the places of the others of this kind."""
    kinds: dict[str, _Kind] = {}
    for sentence in sentences:
        match = _PLACE.match(sentence)
        location, rest = match.groups() if match else ("", sentence)
        key = _VALUE.sub("", rest.partition(": ")[0])
        if key not in kinds:
            kinds[key] = _Kind(sentence)
        elif location:
            kinds[key].other_places.append(location)
    lines = [kind.text() for kind in kinds.values()]
    if len(lines) > _SHOWN_KINDS:
        lines = [*lines[:_SHOWN_KINDS], f"and {len(lines) - _SHOWN_KINDS} mistakes of other kinds"]
    return "\n".join(lines)
