# SPDX-License-Identifier: Apache-2.0
"""The sizes of batches that the testbench runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Case:
    """One batch."""

    seqlen: int = 1024  # tokens of a sample
    micro_batch_size: int = 1  # samples of a microbatch in rows of their own
    batch_size: int = 1  # samples of a step
    max_token_len: int | None = None  # tokens of a packed row: as many samples as fit
    shape: Literal["bshd", "thd"] = "bshd"  # samples in rows of their own, or packed into one row
    system: str = "megatron"  # the only one there is

    @property
    def name(self) -> str:
        """Key of the case in the output."""
        return ",".join(
            f"{key}={value}"
            for key, value in asdict(self).items()
            if key != "system" and value is not None
        )

    @property
    def samples(self) -> int:
        """Samples that run at once."""
        return (
            (self.max_token_len or self.seqlen) // self.seqlen
            if self.shape == "thd"
            else self.micro_batch_size
        )

    @property
    def tokens(self) -> int:
        return self.samples * self.seqlen


def read_cases(path: Path) -> tuple[str | None, list[Case]]:
    """The model that a file of cases names, if it does, and its cases."""
    where, found = f"--cases {path}", strict_json.read(path)
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("cases"), list)
        or not found["cases"]
    ):
        raise UserError(
            f'{where}: write {{"model": ID, "cases": [{{"seqlen": 1024, "micro_batch_size": 1}}]}}'
        )
    if unknown := set(found) - {"model", "cases"}:
        raise UserError(f"{where} has the key {min(unknown)}: it has model and cases only")
    return found.get("model"), [
        _case(values, f"{where}, case {index}") for index, values in enumerate(found["cases"])
    ]


def _case(values: Any, where: str) -> Case:
    if not isinstance(values, Mapping):
        raise UserError(
            f"{where} is not an object: write sizes such as seqlen and micro_batch_size"
        )
    known = [field.name for field in fields(Case)]
    for key, value in values.items():
        if key not in known:
            raise UserError(
                f"{where} has the key {key}{did_you_mean(key, known)}; known: {', '.join(known)}"
            )
        choices = {"shape": ("bshd", "thd"), "system": ("megatron",)}.get(key)
        if choices and value not in choices:
            raise UserError(f"{where}: {key}={value!r} is not one of {', '.join(choices)}")
        optional = key == "max_token_len" and value is None
        if not choices and not optional and (type(value) is not int or value < 1):
            raise UserError(f"{where}: {key}={value!r} is not a number of at least 1")
    case = Case(**values)
    if case.batch_size % case.micro_batch_size and case.shape == "bshd":
        raise UserError(
            f"{where}: micro_batch_size={case.micro_batch_size} does not divide batch_size={case.batch_size}"
        )
    if not case.samples:
        raise UserError(
            f"{where}: max_token_len={case.max_token_len} has no room for seqlen={case.seqlen}"
        )
    return case
