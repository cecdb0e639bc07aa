# SPDX-License-Identifier: Apache-2.0
"""Every family in one process: logits, gradients, bytes and config against transformers' own model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.bridge import AutoBridge
from tests.families import harness
from tests.families.rows import ROWS

# set by transformers when a config is saved or loaded
_BOOKKEEPING = ("_name_or_path", "architectures", "transformers_version")


@pytest.mark.parametrize("name", ROWS)
def test_numbers_and_bytes(family_case, tmp_path, name):
    problems = harness.numbers_and_bytes(family_case(name), "one", tmp_path / "out")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", ROWS)
def test_plan_covers_both_sides_once(family_case, name):
    case = family_case(name)
    bridge, model = harness.build(case, "one")
    plan = bridge.plan(model)
    claimed = [part for task in plan.tasks if not task.is_copy for part in task.mapping.parts]
    assert len(claimed) == len(set(claimed))
    stored = case.values or harness.read_weights(case.checkpoint)
    assert sorted([*plan.hf_names, *plan.ties, *plan.buffers]) == sorted(stored)
    ours = {name for name, value in model[0].state_dict().items() if isinstance(value, torch.Tensor)}
    assert sorted(task.param_name for task in plan.tasks) == sorted(ours)


@pytest.mark.parametrize("name", ROWS)
def test_config_round_trip(family_case, name):
    case = family_case(name)
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider(load_weights=False)
    config = bridge.hf_config
    rebuilt = type(config)(**bridge._bridge.megatron_to_hf_config(provider)).to_dict()
    wanted = config.to_dict()
    keys = [key for key in wanted | rebuilt if key not in (*_BOOKKEEPING, "quantization_config")]
    assert {key: rebuilt.get(key) for key in keys} == {key: wanted.get(key) for key in keys}


@pytest.mark.parametrize("name", ROWS)
def test_an_export_without_a_source_loads_in_transformers(family_case, tmp_path, name):
    case = family_case(name)
    bridge, model = harness.build(case, "one")
    sourceless = AutoBridge.from_hf_config(bridge.hf_config)
    sourceless.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    hf, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        logits = hf.eval()(input_ids=case.batch[0], use_cache=False).logits
    assert torch.equal(logits, case.logits)
