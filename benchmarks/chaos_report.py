# SPDX-License-Identifier: Apache-2.0
"""What came of the starts of a chaos run, and a table of the times."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Attempt:
    """What came of one start of the run; ``ended`` is on the monotonic clock, the others are seconds it took."""

    fault: str
    exit_code: int
    ended: float = 0.0
    detected: float | None = None
    recovered: float | None = None
    problems: list[str] = field(default_factory=list)


def read(log: Path) -> list[Attempt]:
    """The attempts that a run has written down."""
    return [Attempt(**json.loads(line)) for line in log.read_text().splitlines()]


def report(attempts: list[Attempt]) -> str:
    """Times and what went wrong, as Markdown."""
    broken = [entry for entry in attempts if entry.problems]
    groups: dict[str, list[Attempt]] = {"all": attempts}
    for entry in attempts:
        groups.setdefault(_what(entry.fault), []).append(entry)
    lines = [
        f"{len(attempts)} starts, {len(broken)} with a problem.",
        "",
        "| what | starts | detected: median s | p99 s | recovered: median s | p99 s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for what, found in sorted(groups.items()):
        numbers = [
            number for name in ("detected", "recovered") for number in _quantiles(found, name)
        ]
        lines.append(f"| {what} | {len(found)} | {' | '.join(numbers)} |")
    return "\n".join(
        [*lines, *(f"PROBLEM {entry.fault}: {'; '.join(entry.problems)}" for entry in broken)]
    )


def _what(fault: str) -> str:
    """A fault without what was drawn for it alone."""
    kind, _, rest = fault.partition(" ")
    words = rest.split()
    if kind == "kill":
        return f"{words[1]} of {'a rank' if words[2] == 'rank' else words[2]}"
    return f"{kind} {words[1]}" if kind in ("disk", "damage") else kind


def _quantiles(attempts: list[Attempt], name: str) -> tuple[str, str]:
    """Median and 99th percentile."""
    values = sorted(value for entry in attempts if (value := getattr(entry, name)) is not None)
    if not values:
        return "", ""
    late = values[min(len(values) - 1, int(0.99 * len(values)))]
    return f"{statistics.median(values):.2f}", f"{late:.2f}"
