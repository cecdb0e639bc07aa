# SPDX-License-Identifier: Apache-2.0
"""Families with Transformer Engine's layers: transformers' logits and gradients, and the same bytes back.

The classes are those of the released Transformer Engine, with kernels of plain PyTorch
(``tests/transformer_engine``). All cells of a session run in one start of two processes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families.rows import ROWS
from tests.transformer_engine.extension import FOLDER

REPOSITORY = Path(__file__).parents[3]
IN_CI = {
    ("deepseek_v2_lite", "sp2"),
    ("gemma2", "pp2"),
    ("gpt_oss", "tp2"),
    ("llama_biases", "sp2"),
    ("nemotron_h_experts", "tp2"),
    ("olmoe", "ep2"),
    ("qwen3_next", "sp2"),
    ("cohere", "tp2"),
    ("gpt_oss", "stored"),
    ("deepseek_v3", "stored"),
    ("gpt2", "lora"),
    ("qwen3_moe", "lora-sp2"),
}
CHECKS = ("one", "stored", "lora", "tp2", "sp2", "pp2", "ep2", "lora-sp2")

# Rows with a setting that these layers cannot express, and the setting that the refusal names.
REFUSED = {
    "attention_bias": (
        *(
            "gpt_oss_tied_no_attention_bias",
            "llama_mlp_bias",
            "cwm_bias",
            "helium",
            "nemotron_h_biases",
        ),
        *("gpt_neox_serial", "seed_oss_no_qkv_biases"),
    ),
    "attention_output_bias": ("seed_oss_split_biases", "granitemoe_biases", "dots1_biases"),
    "backend": ("deepseek_v32", "glm_moe_dsa"),
    "norm_gain": ("nanochat", "nanochat_biases"),
    "value_norm": (
        "gemma4",
        "gemma4_keys_are_values",
        "gemma4_experts",
        "gemma4_biases",
        "gemma4_one_key",
    ),
    "layernorm_bias": ("cohere", "cohere_head_norms", "cohere2"),
    "mlp_bias": (
        *(
            "gemma_biases",
            "gemma2_biases",
            "gemma3_old_style",
            "llama_attention_bias",
            "olmo3_tied",
        ),
        *("hunyuan_dense_biases", "olmo2_groups", "qwen3_tied_biases_windows"),
    ),
}
# linear layers in the place of attention, no layer that the adapters are for, experts one by one
LEFT_OUT = {("deci_linear", "sp2"), ("deci_linear", "lora-sp2")}
LEFT_OUT |= {
    (name, lora)
    for name in ("nemotron_h_expert_groups", "qwen3_moe_sequential", "mamba2", "mamba2_tied")
    for lora in ("lora", "lora-sp2")
}
REFUSES = {name: setting for setting, names in REFUSED.items() for name in names}


def cells():
    everywhere = ("one", "stored", "lora", "sp2", "lora-sp2")
    rows = {row.name: (*everywhere, *row.layouts, *row.slow) for row in ROWS.values()}
    found = {
        (name, check) for name, checks in rows.items() for check in checks if check in CHECKS
    } - LEFT_OUT
    assert found >= IN_CI
    for name, check in sorted(found):
        yield pytest.param(name, check, marks=() if (name, check) in IN_CI else pytest.mark.slow)


@pytest.fixture(scope="module")
def proven(request, tmp_path_factory):
    """What differs in each selected cell."""
    items = [
        item
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    calls = [item.callspec.params for item in items]
    output = tmp_path_factory.mktemp("proof") / "problems.json"
    return found_by("proof", output, *(f"{call['check']}:{call['name']}" for call in calls))


def found_by(script, output, *arguments):
    """What a script of ``tests/transformer_engine`` writes."""
    if not FOLDER.is_dir():
        pytest.skip("no Transformer Engine: run scripts/extra.sh te")
    command = [sys.executable, "-m", f"tests.transformer_engine.{script}", str(output), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


@pytest.mark.slow
def test_optimizers_resume(tmp_path):
    """Those of Transformer Engine, precision-aware ones, and Megatron-Core's offloaded ones: bit for bit."""
    found = found_by("optimizers", tmp_path / "problems.json")
    assert found
    assert found == {case: [] for case in found}


def test_precisions_reach_transformer_engine(tmp_path):
    """Delayed scaling is one context for all of the four layers; current scaling leaves out the first and the last."""
    assert found_by("precisions", tmp_path / "recipes.json") == {
        "bf16_with_fp8_current_scaling_mixed": [
            "Float8CurrentScaling(fp8_format=Format.HYBRID, fp8_dpa=False)"
        ]
        * 2,
        "bf16_with_fp8_delayed_scaling_mixed": [
            "TEDelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo=max, margin=0, "
            "fp8_dpa=False)"
        ],
        "bf16_with_fp8_subchannel_scaling_mixed": [
            "Float8BlockScaling(fp8_format=Format.E4M3, fp8_dpa=False)"
        ]
        * 4,
        "bf16_with_mxfp8_mixed": [
            "MXFP8BlockScaling(fp8_format=Format.E4M3, margin=0, fp8_dpa=False)"
        ]
        * 4,
        "bf16_with_nvfp4_mixed": [
            "NVFP4BlockScaling(fp8_format=Format.E4M3, fp4_format=Format.E2M1, fp8_dpa=False)"
        ]
        * 4,
    }


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "check"), cells())
def test_a_family(proven, name, check):
    problems = proven[f"{check}:{name}"]
    if name in REFUSES:
        problem, *_ = [
            line for line in problems if line.startswith("refused")
        ]  # another rank may fail by that
        assert problem.startswith(f"refused: {REFUSES[name]}"), problem
        assert problem.endswith("set model.backend='torch'"), problem
    else:
        assert not problems, "\n".join(problems)
