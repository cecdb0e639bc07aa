# SPDX-License-Identifier: Apache-2.0
"""A range is declared beside its field, or beside the class that inherits the field from Megatron-Core."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from megatron.core.distributed import DistributedDataParallelConfig as CoreDDPConfig
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.models.core_ranges import TRANSFORMER_RANGES
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.config.blocks.core_ranges import DDP_RANGES, OPTIMIZER_RANGES
from megatron.bridge.training.config.ranges import all_ranges
from megatron.bridge.utils.config.coerce import coerce, field_types
from megatron.bridge.utils.config.ranges import ABOVE_ZERO, Range, range_of, ranges_of


@dataclass
class Foreign:
    size: int = 1
    rate: float = 1.0


@dataclass
class Base(Foreign):
    INHERITED_RANGES: ClassVar = {"size": Range(least=1)}

    steps: Annotated[list[int], Range(least=1, of_items=True)] = dataclasses.field(
        default_factory=list
    )
    share: Annotated[float | None, Range(least=0, below=1)] = None


@dataclass
class Derived(Base):
    size: Annotated[int, Range(least=2)] = 2


def test_the_nearest_class_decides():
    assert range_of(Base, "size") == Range(least=1)
    assert range_of(Derived, "size") == Range(least=2)
    assert range_of(Derived, "rate") is None
    assert set(ranges_of(Derived)) == {"size", "steps", "share"}


def test_the_type_of_an_annotated_field_is_that_without_the_range():
    assert field_types(Derived)["share"] == float | None
    assert coerce(1, field_types(Derived)["share"]) == 1.0


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("size", [2, None, True], [1, -5]),
        ("steps", [[], [1, 7], None], [[1, 0]]),
        ("share", [0, 0.999, math.nan, "word"], [1, 1.0, -1e-9]),
    ],
)
def test_numbers_out_of_a_range_are_refused_with_their_key(name, good, bad):
    allowed = range_of(Derived, name)
    assert not [value for value in good if allowed.refusal(name, value)]
    assert [allowed.refusal(name, value) for value in bad] == [
        f"{name}={value}: must {allowed.rule}" for value in bad
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_another_rule_refuses_what_is_not_finite(value):
    assert ABOVE_ZERO.refusal("threshold", value) is None


@pytest.mark.parametrize(
    ("core", "table"),
    [
        (TransformerConfig, TRANSFORMER_RANGES),
        (CoreOptimizerConfig, OPTIMIZER_RANGES),
        (CoreDDPConfig, DDP_RANGES),
    ],
)
def test_inherited_ranges_are_of_fields_of_megatron_core(core, table):
    assert table.keys() <= {entry.name for entry in dataclasses.fields(core)}


def test_a_provider_has_the_ranges_of_all_its_bases():
    ranges = ranges_of(MLAModelProvider)
    assert ranges["num_layers"] == TRANSFORMER_RANGES["num_layers"]
    assert ranges["rotary_base"] == ABOVE_ZERO == all_ranges()["model.rotary_base"]
