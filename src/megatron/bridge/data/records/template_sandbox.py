# SPDX-License-Identifier: Apache-2.0
"""Chat templates are programs of strangers: limits of time and memory for a process, and bounded arithmetic."""

import json
import operator
import os
import resource
import signal
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CPU_SECONDS = 10.0
MEMORY = 1 << 30
MAX_BITS = 1 << 16  # of an integer
MAX_LENGTH = 1 << 26  # of a repeated text or list
FREE_TEXT, MAX_GROWTH = 1 << 20, 16
"""A template may write this many characters, and this many times the conversation."""


class RenderedText(NamedTuple):
    text: str
    spans: list[tuple[int, int]]  # first character and end of each part that is marked as generated


def render_here(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    find_spans: bool,
) -> RenderedText:
    """Render a conversation in this process, without limits of time and memory.

    Args:
        template: As in ``template_rendering.render_conversation``, like the other arguments.
        messages: See there.
        tools: See there.
        options: See there.
        find_spans: See there.
    """
    texts, spans = _bounded_renderer()(
        [list(messages)],
        tools=list(tools) if tools else None,
        chat_template=template,
        return_assistant_tokens_mask=find_spans,
        **options,
    )
    text: str = texts[0]
    if len(text) > FREE_TEXT:
        given = len(json.dumps([list(messages), tools, dict(options)], default=str))
        if len(text) > FREE_TEXT + MAX_GROWTH * given:
            raise MemoryError(f"it makes {len(text):,} characters of {given:,}")
    return RenderedText(text, spans[0] if spans else [])


@contextmanager
def limited(cpu_seconds: float = CPU_SECONDS, memory: int = MEMORY) -> Generator[None]:
    """Stop the block with an error when it takes more than this CPU time or memory; for the main thread.

    Args:
        cpu_seconds: User time of the process.
        memory: Bytes in addition to the address space of the process at the start.

    Raises:
        TimeoutError: The block takes longer.
        MemoryError: The block needs more memory.
    """

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes more than {cpu_seconds:.0f} s")

    handler = signal.signal(signal.SIGVTALRM, interrupt)
    before = limit_memory(memory)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def limit_memory(memory: int) -> tuple[int, int]:
    """Allow ``memory`` bytes more than the process has, and return the limits before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
    if soft != resource.RLIM_INFINITY:
        limit = min(soft, limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return soft, hard


@cache
def _bounded_renderer() -> Callable[..., Any]:
    """Return transformers' ``render_jinja_template`` with arithmetic of bounded size.

    A single operation such as ``9**9**9`` takes hours, in which Python handles no signal. The functions of
    transformers are copied with another environment in their globals, so they stay as they are for others.
    """
    from transformers.utils import chat_template_utils as utils

    original: Any = utils
    compile_names = {"ImmutableSandboxedEnvironment": _bounded_environment()}
    compile_template = _with_globals(original._cached_compile_jinja_template, compile_names)
    render_names = {"_compile_jinja_template": cache(compile_template)}
    return _with_globals(original.render_jinja_template, render_names)


def _with_globals(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """Copy a function, in which the global ``names`` have other values."""
    for name in names:
        if name not in function.__code__.co_names:
            raise RuntimeError(f"{function.__module__}.{function.__name__} no longer uses {name}")
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _bounded_environment() -> type:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, in which no single operation takes long."""

        intercepted_binops = frozenset(("*", "**"))

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.binop_table |= {"*": _multiply_bounded, "**": _raise_to_power}

    return BoundedEnvironment


def _multiply_bounded(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise OverflowError(f"it computes a number of more than {MAX_BITS:,} bits")
    else:
        _check_length(left, right)
        _check_length(right, left)
    return operator.mul(left, right)


def _check_length(repeated: Any, count: Any) -> None:
    """Refuse a long text or list that the multiplication would make."""
    is_repetition = isinstance(repeated, Sequence) and isinstance(count, int)
    if is_repetition and count * len(repeated) > MAX_LENGTH:
        raise MemoryError(f"it repeats a text or a list to a length above {MAX_LENGTH:,}")


def _raise_to_power(left: Any, right: Any) -> Any:
    is_integer = isinstance(left, int) and isinstance(right, int) and abs(left) > 1
    if is_integer and right * left.bit_length() > MAX_BITS:
        raise OverflowError(f"it computes a number of more than {MAX_BITS:,} bits")
    return operator.pow(left, right)
