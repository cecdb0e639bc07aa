# SPDX-License-Identifier: Apache-2.0
"""``megatron.bridge.testing.reference`` for the rows of this folder.

``Case`` names such a row and a folder with its reference; it is all that is sent to another process.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.bridge.testing import reference
from megatron.bridge.testing.reference import *  # noqa: F403 - what users have, under the same names
from megatron.bridge.testing.row import Row
from tests.families.own_models import model_class
from tests.families.rows import ROWS


@dataclass(frozen=True)
class Case(reference.ReferenceFiles):
    """The name of a row and the folder with its reference."""

    name: str
    directory: Path

    @property
    def row(self) -> Row:
        return ROWS[self.name]


def make_reference(row: Row, directory: Path) -> Case:
    """Make the row's model and let transformers compute logits and gradients."""
    reference.make_reference(_with_class(row), directory)
    return Case(row.name, directory)


def hf_model(row: Row) -> Any:
    """The row's transformers model, every number of it random."""
    return reference.hf_model(_with_class(row))


def _with_class(row: Row) -> Row:
    return replace(row, model=model_class(row.model))
