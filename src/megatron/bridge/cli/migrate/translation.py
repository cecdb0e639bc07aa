# SPDX-License-Identifier: Apache-2.0
"""The result of a translation, and its report."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support.output_files import header
from megatron.bridge.cli.support.text_format import write_file
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.ranges import Range
from megatron.bridge.utils.errors import refuse


@dataclass
class Translation:
    """Settings of another framework as settings of a run."""

    settings: dict[str, str] = field(default_factory=dict[str, str])  # dotted key -> value as YAML
    origins: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # dotted key -> the setting that it comes from
    implied: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # setting -> why it needs no setting here
    missing: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # setting -> why it has no counterpart

    def set(self, key: str, value: Any, source: str) -> None:
        """Set ``key``; text stays as it is, other values become YAML."""
        self.settings[key] = value if isinstance(value, str) else json.dumps(value)
        self.origins[key] = source

    def refuse_out_of_range(self, ranges: Mapping[str, Range]) -> None:
        """Refuse numbers outside of ``ranges``, of dotted keys, by the names that they had.

        Raises:
            UserError: a line for each of them.
        """
        values = {key: yaml_text.read(text, key) for key, text in self.settings.items()}
        problems = {
            key: ranges[key].refusal(key, value)
            for key, value in values.items()
            if key in ranges and isinstance(value, int | float)
        }
        refuse(f"{self.origins[key]}: {problem}" for key, problem in problems.items() if problem)

    def drop(self, key: str, reason: str) -> None:
        if self.settings.pop(key, None) is not None:
            self.implied[self.origins.pop(key)] = reason

    def overrides(self) -> list[str]:
        """``key=value`` items, as on the command line."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def show(self, command: str, text: str, output: Path | None) -> None:
        """Write ``text`` of a command to a file or to standard output, and the report to standard error."""
        if output is None:
            sys.stdout.write(text)
        else:
            write_file("--output", output, header(command) + text)
        sys.stderr.writelines(f"{line}\n" for line in self.report())

    def report(self) -> Iterator[str]:
        """A line for each setting, those without counterpart last."""
        for key, value in self.settings.items():
            yield f"{self.origins[key]}: {key}={value}"
        for title, reasons in (
            ("nothing to set for", self.implied),
            ("no counterpart for", self.missing),
        ):
            for name, reason in reasons.items():
                yield f"{title} {name}: {reason}"
