# SPDX-License-Identifier: Apache-2.0
"""Every family under layouts of two and four processes: transformers' greedy tokens and log-probabilities.

By default each kind of state and each feature of a layer runs under one layout. The others are slow: one process
has proven every row, and the layouts of training share their layers.
"""

import pytest

from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.testing import reference
from tests.families import decoding
from tests.families.row import Row
from tests.families.rows import ROWS

IN_CI = {
    ("llama_tied", "tp2"),
    ("gemma2", "tp2"),
    ("gemma3", "pp2"),
    ("gemma4", "tp2"),
    ("mistral_window", "tp2"),
    ("gpt_oss", "ep2"),
    ("olmoe", "tp2"),
    ("deepseek_v2_lite", "tp2"),
    ("glm4_moe_lite", "pp2"),
    ("lfm2", "tp2"),
    ("lfm2_moe", "ep2"),
    ("granitemoehybrid_dense", "tp2"),
    ("nemotron_h_experts", "tp2"),
    ("qwen3_5_moe", "ep2"),
    ("qwen3_next", "vp2"),
    ("deepseek_v3", "tp2ep2"),
    ("nemotron_h", "tp2pp2"),
}


def two_processes():
    for row in ROWS.values():
        for layout in row.layouts:
            if layout in ("tp2", "pp2", "ep2", "vp2"):
                yield cell(row.name, layout)


def cell(name, layout):
    return pytest.param(name, layout, marks=() if (name, layout) in IN_CI else pytest.mark.slow)


def test_what_runs_in_ci_exists():
    assert {
        (row.name, layout) for row in ROWS.values() for layout in (*row.layouts, *row.four)
    } >= IN_CI


def check(pool, case, layout):
    found = pool.run(decoding.differences, case, layout, decoding.references(case))
    assert not any(found), "\n".join(
        dict.fromkeys(problem for problems in found for problem in problems)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout"), two_processes())
def test_two_processes(two_workers, family_case, name, layout):
    check(two_workers, family_case(name), layout)


@pytest.mark.parametrize(
    ("name", "layout"), [cell(row.name, layout) for row in ROWS.values() for layout in row.four]
)
def test_four_processes(four_workers, family_case, name, layout):
    check(four_workers, family_case(name), layout)


def test_stages_with_and_without_windows_make_the_same_plans(two_workers, tmp_path):
    """The rings of one stage keep texts from sharing their beginnings on the other, too."""
    config = {
        **ROWS["gemma2"].config,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    reference.hf_model(Row("short", "Gemma2ForCausalLM", config)).save_pretrained(tmp_path)
    rings, whole = (two_workers.run(generated, tmp_path, rings) for rings in (True, False))
    assert rings == whole


def generated(folder, rings):
    shared = list(range(5, 45))
    with LLM(str(folder), pp=2, chunk=8, kv_memory=1 << 20, window_rings=rings) as llm:
        found = llm.generate(
            [[*shared, it] for it in (1, 2, 3)], Sampling(max_new_tokens=6, ignore_eos=True)
        )
    return [one[0].tokens for one in found]
