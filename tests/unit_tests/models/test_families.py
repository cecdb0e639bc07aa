# SPDX-License-Identifier: Apache-2.0
"""Every family in one process: logits, gradients, bytes, plan and config against transformers' own model."""

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.testing import family
from tests.families import configs, harness
from tests.families.rows import ROWS

WHOLE = [pytest.param(name, marks=pytest.mark.slow) for name, row in ROWS.items() if not row.brief]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROWS)
def test_all_with_one_build(family_case, tmp_path, name):
    case = family_case(name)
    bridge, model = harness.build(case, "one", ddp=True)
    check_plan(case, bridge.plan(model), model)
    problems = family.export_without_a_source_of(bridge, model, case, tmp_path / "new")
    problems += configs.round_trip(bridge.hf_config)
    problems += harness.numbers_and_bytes_of(bridge, model, case, tmp_path / "out")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", WHOLE)
def test_numbers_and_bytes(family_case, tmp_path, name):
    problems = harness.numbers_and_bytes(family_case(name), "one", tmp_path / "out")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", WHOLE)
def test_plan_and_an_export_without_a_source(family_case, tmp_path, name):
    case = family_case(name)
    bridge, model = harness.build(case, "one")
    check_plan(case, bridge.plan(model), model)
    problems = family.export_without_a_source(case, tmp_path / "out")
    assert not problems, "\n".join(problems)


def check_plan(case, plan, model):
    """Every tensor, and every parameter, is in the plan exactly once."""
    claimed = [part for task in plan.tasks if not task.is_copy for part in task.mapping.parts]
    assert len(claimed) == len(set(claimed))
    stored = case.values or harness.read_weights(case.checkpoint)
    assert sorted([*plan.hf_names, *plan.ties, *plan.buffers]) == sorted(stored)
    ours = [
        name
        for name, value in unwrap(model[0]).state_dict().items()
        if isinstance(value, torch.Tensor)
    ]
    assert sorted(task.param_name for task in plan.tasks) == sorted(ours)


@pytest.mark.parametrize("name", WHOLE)
def test_config_round_trip(family_case, name):
    problems = configs.round_trip(
        AutoBridge.from_hf_pretrained(family_case(name).checkpoint).hf_config
    )
    assert not problems, "\n".join(problems)
