# SPDX-License-Identifier: Apache-2.0
"""Schedules: nothing is computed twice or left out, memory is never shared, and every text is cut the same way."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.inference.scheduler import ALIGNMENT, Arena, Limits, ScheduledText, Scheduler


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), max_size=60), st.integers(0, 400))
def test_extents_never_overlap(actions, size):
    arena, taken = Arena(size), {}
    for kind, count in actions:
        if kind == 0 or not taken:
            start = arena.take(count)
            if start is not None:
                taken[start] = count
        elif kind == 1:
            arena.give_back(taken.popitem()[0])
        elif arena.grow(start := next(iter(taken)), count + taken[next(iter(taken))]):
            taken[start] += count
        ends = sorted((start, start + arena.length(start)) for start in taken)
        assert all(start % ALIGNMENT == 0 and stop <= arena.size for start, stop in ends)
        assert all(one[1] <= other[0] for one, other in pairwise(ends))
        assert arena.free == arena.size - sum(stop - start for start, stop in ends)
    for start in taken:
        arena.give_back(start)
    assert not arena.size or arena.take(arena.size) == 0


class Model:
    """Remembers what the caches hold, token by token, and which rows of a text were computed together."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.cache = [None] * scheduler.arena.size
        self.cuts = {}

    def run(self, plan):
        for copy in plan.copies:
            held = self.cache[copy.source : copy.source + copy.count]
            self.cache[copy.target : copy.target + copy.count] = held
        rows = [row for work in plan.work for row in range(work.row, work.row + work.count)]
        assert rows == list(range(plan.rows))
        for work in plan.work:
            self._compute(work)

    def _compute(self, work):
        text = work.text
        assert work.start + work.count <= self.scheduler.arena.length(text.extent)
        before = self.cache[text.extent : text.extent + work.start]
        assert before == text.tokens[: work.start], "the caches hold another text"
        for index in range(work.start, work.start + work.count):
            self.cache[text.extent + index] = text.tokens[index]
            cut = (work.start, work.count)
            assert self.cuts.setdefault((id(text), index), cut) == cut, (
                "a text is cut in another way"
            )


@pytest.mark.parametrize("schedules", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_schedules(schedules):
    """Texts come, go on, end and are cancelled, with much and with little memory."""
    draw = random.Random(0)
    for _ in range(schedules):
        limits = Limits(
            tokens=draw.choice((96, 160, 640)),
            requests=draw.randint(1, 6),
            chunk=draw.choice((4, 8)),
            rows=draw.choice((8, 24)),
            reserve=draw.choice((1, 16)),
            reuses=draw.random() < 0.8,
        )
        run_schedule(draw, limits)


def run_schedule(draw, limits):
    scheduler = Scheduler(limits)
    model, texts, steps = Model(scheduler), [make_text(draw) for _ in range(12)], 0
    coming, going = list(texts), []
    while coming or not scheduler.is_idle:
        while coming and (scheduler.is_idle or draw.random() < 0.5):
            going.append(coming.pop())
            scheduler.add(going[-1])
        plan = scheduler.plan()
        assert plan.work, "a step without work"
        whole = {
            id(work.text): work for work in plan.work if work.text.is_whole and work.start == 0
        }.values()
        longest = max((work.count for work in whole), default=0)
        assert plan.rows <= max(limits.rows, limits.chunk, longest) + len(scheduler.running)
        assert all(work.count == work.text.prompt_length for work in whole), "a whole prompt is cut"
        assert sum(work.text.images is not None for work in whole) <= 1
        assert len(scheduler.running) <= limits.requests
        model.run(plan)
        sampled = [work.text for work in plan.work if work.samples]
        scheduler.commit(plan)
        for text in sampled:
            text.tokens.append(1000 + 31 * len(text.tokens) % 7)
        over = [text for text in going if not text.needs_sample]
        if draw.random() < 0.05:
            over.append(draw.choice(going))
        for text in dict.fromkeys(text for text in over if text in going):
            scheduler.remove(text)
            going.remove(text)
        steps += 1
        assert steps < 5000, "no end"
    assert len(scheduler._slots) == limits.requests
    for text in list(scheduler._over.values()):
        scheduler._release(text)
    assert scheduler.arena.free == scheduler.arena.size


def make_text(draw):
    prompt = [7] * draw.choice((0, 8, 17)) + [draw.randrange(5) for _ in range(draw.randint(1, 20))]
    whole = (
        {"images": draw.choice(["images", None]), "ahead": [0] * len(prompt)}
        if draw.random() < 0.3
        else {}
    )
    limit = len(prompt) + draw.randint(1, 40)
    priority = draw.choice((-1, 0, 0, 3))
    return ScheduledText(list(prompt), len(prompt), limit, priority=priority, **whole)


@pytest.mark.parametrize(
    ("rows", "counts"), [(8, [[1, 8], [1, 8], [1, 1, 8]]), (25, [[1, 8, 8, 8], [1, 1, 1]])]
)
def test_chunks_join_single_tokens(rows, counts):
    """A step computes as many chunks as fit, and at least one beside the single tokens of other texts."""
    scheduler = Scheduler(Limits(tokens=640, requests=8, chunk=8, rows=rows, reuses=False))
    for length in (1, 16, 8):
        scheduler.add(ScheduledText([7] * length, length, length + 9))
    for expected in counts:
        plan = scheduler.plan()
        assert [work.count for work in plan.work] == expected
        sampled = [work.text for work in plan.work if work.samples]
        scheduler.commit(plan)
        for text in sampled:
            text.tokens.append(9)


def test_a_text_that_can_never_fit_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match=r"Engine\.check"):
        Scheduler(Limits(tokens=64, requests=1)).add(ScheduledText([1], 1, 100))


def test_equal_beginnings_are_copied():
    scheduler = Scheduler(Limits(tokens=640, requests=4, chunk=8, rows=64))
    prompt = list(range(20))
    first = ScheduledText(list(prompt), 20, 24)
    scheduler.add(first)
    scheduler.commit(scheduler.plan())
    scheduler.add(ScheduledText([*prompt[:18], 99], 19, 24))
    plan = scheduler.plan()
    assert [(copy.source, copy.count) for copy in plan.copies] == [(first.extent, 16)]
    assert [(work.start, work.count) for work in plan.work if work.text is not first] == [(16, 3)]


def test_a_long_text_is_computed_again_when_its_angles_change():
    scheduler = Scheduler(Limits(tokens=640, requests=4, chunk=8, rows=64, reuses=False))
    text = ScheduledText([1] * 10, 10, 20, switch=12)
    scheduler.add(text)
    seen = []
    while text.needs_sample:
        plan = scheduler.plan()
        seen.append([(work.start, work.count, text.long) for work in plan.work])
        sampled = any(work.samples for work in plan.work)
        scheduler.commit(plan)
        text.tokens += [1] * sampled
    assert seen[:3] == [[(0, 8, False), (8, 2, False)], [(10, 1, False)], [(11, 1, False)]]
    assert seen[3] == [(0, 8, True), (8, 4, True)]
    assert seen[4] == [(12, 1, True)]
