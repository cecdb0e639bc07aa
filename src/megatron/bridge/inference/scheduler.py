# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens that the next step computes; without torch, so that tests can run thousands of schedules.

Every rank runs the same scheduler on the same events, so ranks exchange only sampled tokens. Prompts are always split
into chunks at multiples of ``chunk`` positions. A preempted text is recomputed exactly as before: its prompt in the
same chunks, its generated tokens one by one. A prompt with images, or with tokens that attend to later tokens, is one
chunk and does not share its caches. Therefore, a text does not depend on the rest of the batch.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ALIGNMENT = 16  # extents begin at multiples of this many tokens, so that vector loads are aligned


class Arena:
    """A first-fit allocator of extents: ranges of ``size`` tokens.

    Example:
        >>> arena = Arena(64)
        >>> arena.take(10), arena.take(30), arena.take(30)
        (0, 16, None)
        >>> arena.give_back(0), arena.free
        (None, 32)
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self._holes: list[tuple[int, int]] = [(0, self.size)] if self.size else []
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Number of free tokens, contiguous or not."""
        return sum(length for _, length in self._holes)

    def take(self, count: int) -> int | None:
        """Return the first token of a new range of at least ``count`` tokens, or None if no hole is large enough."""
        size = rounded(count)
        for index, (start, length) in enumerate(self._holes):
            if length >= size:
                self._shrink(index, size)
                self._taken[start] = size
                return start
        return None

    def grow(self, start: int, count: int) -> bool:
        """Extend the range at ``start`` to ``count`` tokens if the tokens after it are free."""
        length = self._taken[start]
        new_length = rounded(count)
        end = start + length
        index = bisect_left(self._holes, (end, 0))
        missing = new_length - length
        if (
            index == len(self._holes)
            or self._holes[index][0] != end
            or self._holes[index][1] < missing
        ):
            return False
        self._shrink(index, missing)
        self._taken[start] = new_length
        return True

    def give_back(self, start: int) -> None:
        insort(self._holes, (start, self._taken.pop(start)))
        index = bisect_left(self._holes, (start, 0))
        for left in (index, index - 1):  # join with the hole after it, then with the hole before it
            if (
                0 <= left < len(self._holes) - 1
                and sum(self._holes[left]) == self._holes[left + 1][0]
            ):
                joined = self._holes[left][0], self._holes[left][1] + self._holes[left + 1][1]
                self._holes[left : left + 2] = [joined]

    def length(self, start: int) -> int:
        return self._taken[start]

    def _shrink(self, index: int, count: int) -> None:
        start, length = self._holes[index]
        self._holes[index : index + 1] = [(start + count, length - count)] if length > count else []


def rounded(count: int) -> int:
    """Return ``count`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class ScheduledText:
    """A prompt and what was generated after it."""

    tokens: list[int]  # all known tokens
    prompt_length: int  # number of prompt tokens
    limit: int  # maximum length of the text
    wants_prompt: bool = False  # whether the logits of the prompt's tokens are needed
    switch: int | None = (
        None  # length above which rotary frequencies differ; None if they never change
    )
    long: bool = False  # whether the text has the frequencies of long texts
    scored: int = 0  # number of prompt tokens whose successor has a log-probability
    chunked: int = (
        0  # number of tokens at the start that are computed in chunks instead of one by one
    )
    computed: int = 0  # number of tokens in the caches
    was_admitted: bool = False  # whether it has been admitted before
    cached: int = 0  # number of prompt tokens that were in the caches at its first admission
    extent: int | None = None  # first token in the caches; None without memory
    slot: int | None = None  # index of recurrent states; None without memory
    shares: bool = True  # whether other texts may reuse its caches
    adapter: str | None = None  # name of its adapter
    priority: int = 0  # of waiting texts, the one with the lowest number runs first
    arrival: int = 0  # number of texts that came before it
    records_experts: bool = False  # whether the experts of its tokens are stored with its caches
    images: Any = None  # images of the prompt
    ahead: list[int] | None = (
        None  # number of later tokens that each prompt token attends to; None if causal
    )
    drafts: list[int] = field(default_factory=list)  # tokens that may follow in the next step

    def __post_init__(self) -> None:
        # if a text is only scored, its last token has no successor
        all_needed = self.needs_sample or self.is_whole
        self.chunked = self.prompt_length if all_needed else max(1, self.prompt_length - 1)
        self.shares = self.shares and not self.is_whole
        self.long = self.switch is not None and self.chunked > self.switch

    def begin_again(self) -> bool:
        """Return whether the next token exceeds ``switch``, so that the full text must be recomputed."""
        if self.switch is None or self.long or self.computed < self.switch:
            return False
        self.long = True
        self.chunked = self.computed
        self.computed = 0
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the prompt is one chunk."""
        return self.images is not None or self.ahead is not None

    @property
    def needs_sample(self) -> bool:
        return len(self.tokens) < self.limit

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes a single token."""
        return self.slot is not None and self.computed >= self.chunked

    @property
    def most_drafts(self) -> int:
        """Number of drafts that can be accepted in the next step: another token is sampled after them."""
        most = self.limit - len(self.tokens) - 1
        if self.switch is not None and not self.long:  # a longer text is computed again
            most = min(most, self.switch - self.computed - 1)
        return max(0, most) if self.computed == len(self.tokens) - 1 else 0


@dataclass(frozen=True)
class Work:
    """``count`` tokens of one text, from position ``start`` of the text, in rows of the step that begin at ``row``."""

    text: ScheduledText
    row: int
    start: int
    count: int
    drafts: int = (
        0  # number of drafts up to this token, which is the last of them unless there are none
    )

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed."""
        if self.drafts:
            return [self.text.drafts[self.drafts - 1]]
        return self.text.tokens[self.start : self.start + self.count]

    @property
    def samples(self) -> bool:
        """Whether this step samples the next token of the text."""
        known = len(self.text.tokens) + self.drafts
        return self.start + self.count == known and self.text.needs_sample

    @property
    def scored(self) -> range:
        """Positions whose next token is a prompt token with a requested log-probability."""
        start = max(self.start, self.text.scored)
        stop = (
            min(self.start + self.count, self.text.prompt_length - 1)
            if self.text.wants_prompt
            else 0
        )
        return range(start, max(start, stop))


@dataclass(frozen=True)
class Copy:
    """``count`` tokens of the caches to copy before the step."""

    source: int
    target: int
    count: int


@dataclass
class StepPlan:
    """One step: first the copies, then the work."""

    copies: list[Copy] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    rows: int = 0
    decoding_rows: int = 0  # rows of texts that decode, with drafts

    @property
    def outputs(self) -> int:
        """Rows whose logits are needed."""
        return sum(len(work.scored) + work.samples for work in self.work)

    @property
    def records_experts(self) -> bool:
        """Whether a text of this step stores the experts of its tokens."""
        return any(work.text.records_experts for work in self.work)

    @property
    def images(self) -> Any:
        """The images of the only text with images, if there is one."""
        return next(
            (
                work.text.images
                for work in self.work
                if work.start == 0 and work.text.images is not None
            ),
            None,
        )


@dataclass(frozen=True)
class Limits:
    """Capacity of a step and of the caches."""

    tokens: int  # tokens of the caches
    requests: int  # texts that are computed at the same time
    chunk: int = 256  # tokens of a prompt that one step computes together
    rows: int = (
        1024  # maximum new tokens in a step, but one chunk fits with any number of single tokens
    )
    reserve: int = (
        256  # generated tokens for which a text initially gets memory; it grows when needed
    )
    reuses: bool = True  # whether a text can reuse the caches of another text with the same prefix


class Scheduler:
    """Texts that wait, run, or have ended while their caches are still in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.arena = Arena(limits.tokens)
        self.waiting: deque[ScheduledText] = deque()
        self.running: list[ScheduledText] = []
        self.prefix_queries = 0  # tokens of prompts for which cached prefixes were looked up
        self.prefix_hits = 0  # tokens of these that were not computed again
        self._arrivals = 0  # number of texts so far
        self._slots = list(range(limits.requests))[::-1]
        self._over: OrderedDict[int, ScheduledText] = OrderedDict()  # by extent, oldest first
        self._chunks: dict[
            int, ScheduledText
        ] = {}  # hash of a prompt's prefix -> a text whose caches begin with it

    def add(self, text: ScheduledText) -> None:
        assert text.limit <= self.arena.size, (
            "Engine.check refuses texts that do not fit into the caches"
        )
        text.arrival = self._arrivals
        self._arrivals += 1
        self._enqueue(text)

    def _enqueue(self, text: ScheduledText) -> None:
        """Let a text wait in the order of priority, then of arrival."""
        position = bisect_right(self.waiting, _order(text), key=_order)
        self.waiting.insert(position, text)

    def remove(self, text: ScheduledText) -> None:
        """Remove a text that has ended or was canceled; the caches of its prompt stay while there is room."""
        if text in self.waiting:
            self.waiting.remove(text)
        if text not in self.running:
            return
        self.running.remove(text)
        assert text.slot is not None
        assert text.extent is not None
        self._slots.append(text.slot)
        text.slot = None
        if self.limits.reuses and text.shares and text.computed >= self.limits.chunk:
            self._over[text.extent] = text
        else:
            self._release(text)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def held_tokens(self) -> int:
        """Number of tokens in the extents of running texts."""
        return sum(
            self.arena.length(text.extent) for text in self.running if text.extent is not None
        )

    def plan(self) -> StepPlan:
        """Return the next step, which is empty only if no text waits or runs."""
        plan = StepPlan()
        for text in list(self.running):
            decodes = (
                text.slot is not None and text.computed >= text.chunked and not text.begin_again()
            )
            if decodes and self._fits(text, text.computed + 1, plan):
                self._append(plan, text, text.computed, 1)
                self._append_drafts(plan, text)
                plan.decoding_rows = plan.rows
        for text in self.running:
            self._plan_prompt(text, plan)
        while self.waiting and self._has_room(plan, self.waiting[0], 0):
            if not self._admit(self.waiting[0], plan):
                break
            self._plan_prompt(self.running[-1], plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Record that ``plan`` was computed; sampled tokens are appended later."""
        for work in plan.work:
            text = work.text
            text.scored = work.scored.stop if work.scored else text.scored
            if work.drafts:  # counted when it is accepted
                continue
            text.computed = work.start + work.count
            if self.limits.reuses and text.shares and text.computed <= text.prompt_length:
                for end, key in _prefix_hashes(text, text.computed, self.limits.chunk):
                    if end > work.start:
                        self._chunks.setdefault(key, text)

    def _has_room(self, plan: StepPlan, text: ScheduledText, start: int) -> bool:
        """Return whether the tokens of a prompt from ``start`` on join the step; one chunk joins any single tokens."""
        if (
            text.images is not None and plan.images is not None
        ):  # a step encodes the images of only one text
            return False
        return (
            plan.rows <= max(len(self.running), plan.decoding_rows)
            or plan.rows + self._chunk(text, start) <= self.limits.rows
        )

    def _chunk(self, text: ScheduledText, start: int) -> int:
        """Return the number of tokens of a prompt that are computed together from ``start`` on."""
        chunk = text.chunked if text.is_whole else self.limits.chunk
        return min(chunk - start % chunk, text.chunked - start)

    def _plan_prompt(self, text: ScheduledText, plan: StepPlan) -> None:
        start = text.computed
        while start < text.chunked and self._has_room(plan, text, start):
            count = self._chunk(text, start)
            self._append(plan, text, start, count)
            start += count

    def _append(
        self, plan: StepPlan, text: ScheduledText, start: int, count: int, drafts: int = 0
    ) -> None:
        plan.work.append(Work(text, plan.rows, start, count, drafts))
        plan.rows += count

    def reserve_drafts(self, text: ScheduledText, most: int) -> int:
        """Return for how many drafts, up to ``most``, a text has memory, after growing it if that is possible."""
        assert text.extent is not None
        size = text.computed + 1 + most
        held = self.arena.length(text.extent)
        if size <= held or self.arena.grow(text.extent, size):
            return most
        return held - text.computed - 1

    def _append_drafts(self, plan: StepPlan, text: ScheduledText) -> None:
        """Compute the drafts of a text one by one, as its tokens are; there must be memory for them."""
        text.drafts = text.drafts[: self.reserve_drafts(text, len(text.drafts))]
        for index in range(len(text.drafts)):
            self._append(plan, text, text.computed + 1 + index, 1, index + 1)

    def _admit(self, text: ScheduledText, plan: StepPlan) -> bool:
        """Allocate memory for ``text`` and let it run; return False if there is not enough."""
        if not self._slots:
            return False
        size = min(text.limit, len(text.tokens) + self.limits.reserve)
        donor, shared = self._donor(text)
        extent = self._take(size, donor)
        if extent is None and donor is not None:  # there is no room in addition to the donor
            donor = None
            shared = 0
            extent = self._take(size, None)
        if extent is None:
            return False
        self.waiting.popleft()
        text.extent = extent
        text.slot = self._slots.pop()
        text.computed = shared
        if not text.was_admitted:
            text.was_admitted = True
            text.cached = shared
        if self.limits.reuses:
            self.prefix_queries += text.prompt_length
            self.prefix_hits += shared
        if donor is not None and donor.extent is not None and shared:
            plan.copies.append(Copy(donor.extent, extent, shared))
        self.running.append(text)
        return True

    def _take(self, size: int, keep: ScheduledText | None) -> int | None:
        """Allocate an extent; evict texts that have ended if necessary, oldest first."""
        extent = self.arena.take(size)
        while extent is None:
            oldest = next((text for text in self._over.values() if text is not keep), None)
            if oldest is None:
                return None
            self._release(oldest)
            extent = self.arena.take(size)
        return extent

    def _fits(self, text: ScheduledText, size: int, plan: StepPlan) -> bool:
        """Return whether ``text`` has memory for ``size`` tokens, after preempting other texts if necessary."""
        assert text.extent is not None
        if size <= self.arena.length(text.extent):
            return True
        size_with_reserve = min(text.limit, size + self.limits.reserve)
        while not (
            self.arena.grow(text.extent, size_with_reserve)
            or self._move(text, size_with_reserve, plan)
        ):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is text:
                return False
        return True

    def _move(self, text: ScheduledText, size: int, plan: StepPlan) -> bool:
        assert text.extent is not None
        extent = self._take(size, None)
        if extent is None:
            return False
        plan.copies.append(Copy(text.extent, extent, text.computed))
        self._forget(text)
        self.arena.give_back(text.extent)
        text.extent = extent
        return True

    def _preempt(self, text: ScheduledText, plan: StepPlan) -> None:
        """Free the memory of a running text, which is recomputed later."""
        assert text.slot is not None
        self.running.remove(text)
        self._slots.append(text.slot)
        self._release(text)
        text.slot = None
        text.computed = 0
        text.drafts = []
        self._enqueue(text)
        remaining_work = [work for work in plan.work if work.text is not text]
        plan.work = []
        plan.rows = 0
        for work in remaining_work:
            self._append(plan, work.text, work.start, work.count, work.drafts)

    def restart(self) -> None:
        """Compute all running texts again from their first token."""
        for text in self.running[::-1]:
            self._preempt(text, StepPlan())

    def _release(self, text: ScheduledText) -> None:
        assert text.extent is not None
        self._over.pop(text.extent, None)
        self._forget(text)
        self.arena.give_back(text.extent)
        text.extent = None

    def forget_caches(self) -> None:
        """Stop reusing caches that exist now, because the weights change."""
        for text in list(self._over.values()):
            self._release(text)
        self._chunks.clear()
        for text in self.running:
            text.shares = False

    def forget_adapter(self, name: str) -> None:
        """Stop reusing caches of texts with an adapter, whose name may get other weights."""
        for text in list(self._over.values()):
            if text.adapter == name:
                self._release(text)

    def _donor(self, text: ScheduledText) -> tuple[ScheduledText | None, int]:
        """Return the text with the longest cached prefix of ``text``, and the length of that prefix."""
        best: tuple[ScheduledText | None, int] = None, 0
        if not (self.limits.reuses and text.shares):
            return best
        needed = (
            min(text.scored, text.prompt_length - 1)
            if text.wants_prompt
            else text.prompt_length - 1
        )
        for stop, key in _prefix_hashes(text, needed, self.limits.chunk):
            donor = self._chunks.get(key)
            if donor is None or donor.extent is None or donor.adapter != text.adapter:
                break
            if donor.records_experts != text.records_experts:
                break
            if donor.tokens[:stop] != text.tokens[:stop]:
                break
            best = donor, stop
        if best[0] is not None and best[0].extent in self._over:
            self._over.move_to_end(best[0].extent)
        return best

    def _forget(self, text: ScheduledText) -> None:
        for _, key in _prefix_hashes(text, text.prompt_length, self.limits.chunk):
            if self._chunks.get(key) is text:
                del self._chunks[key]


def _order(text: ScheduledText) -> tuple[int, int]:
    return text.priority, text.arrival


def _prefix_hashes(text: ScheduledText, stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield length and hash of each prefix of full chunks, up to ``stop`` tokens."""
    key = hash((text.adapter, text.records_experts))
    for end in range(chunk, stop + 1, chunk):
        key = hash((key, *text.tokens[end - chunk : end]))
        yield end, key
