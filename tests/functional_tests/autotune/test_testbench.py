# SPDX-License-Identifier: Apache-2.0
"""Operators of real models over two processes: weights, activations and work beside the theory."""

import json

import pytest

from scripts.testbench import Bench, Case, Launcher, TestWithHiddenInputs, register
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured

# PyTorch does not count the operations of attention kernels on a CPU
WITHOUT_ATTENTION = (
    "ColumnParallelLinear",
    "RowParallelLinear",
    "MLPDense",
    "Router",
    "GroupedMLP",
    "MoELayer",
)
CASE = Case(256)
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "etp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 2,
    },
}


def _run(family, layout, folder):
    config = configured(provider(family, **layout)).resolve().config
    launcher = Launcher(Bench(config), folder, repeats=1, theoretical_flops=True)
    return launcher.run((), [CASE]).files


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "tp2"),
        ("llama", "cp2"),
        ("qwen3_moe", "ep2"),
        pytest.param("qwen3_moe", "etp2", marks=pytest.mark.slow),
    ],
)
def test_theory_is_what_operators_do(two_workers, tmp_path, family, name):
    for files in two_workers.run(_run, family, LAYOUTS[name], tmp_path):
        found = files["timing"].keys()
        assert found >= {"Embedding", "SelfAttention", "OptimizerStep", "AllReduce", "GPTModel"}
        assert ("AttentionWithCP" in found) == (name == "cp2")
        for op, cases in files["memory_weights"].items():
            assert cases[CASE.name]["real_value"] == cases[CASE.name]["estimated_value"], op
        for op, cases in files["memory_activation"].items():
            leaf = cases[CASE.name]
            if leaf["estimated_value"] is not None and op != "Embedding":
                assert leaf["real_value"] == pytest.approx(leaf["estimated_value"], rel=0.13), op
        for op in files["flops"].keys() & set(WITHOUT_ATTENTION):
            for leaf in files["flops"][op][CASE.name].values():
                # random routers give one of two ranks of experts a few tokens more
                assert leaf["real_value"] == pytest.approx(
                    leaf["estimated_value"], rel=0.1 * (name == "ep2")
                ), op


def _twice(folder):
    config = configured(provider("llama")).resolve().config
    register(
        "FinalNorm", TestWithHiddenInputs(lambda path, module: path == "decoder.final_layernorm")
    )
    bench = Bench(config)
    for op, case in (
        ("FinalNorm", Case(64)),
        ("MLPDense", Case(64, max_token_len=200, shape="thd")),
    ):
        Launcher(bench, folder, repeats=1).run([op], [case])
    Launcher(bench, folder, mode=2, repeats=1).run(["MLPDense"], [Case(64)])


def test_two_runs_share_a_folder(two_workers, tmp_path):
    two_workers.run(_twice, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / "collect_data" / f"rank_{rank}" / "timing.json").read_text())
        assert set(found) == {"FinalNorm", "MLPDense"}
        (leaf,) = found["FinalNorm"].values()
        assert leaf["forward"]["real_value"] > 0
        assert leaf["forward"]["real"].endswith("s")
        assert (
            tmp_path / "torch_profiler" / "MLPDense" / f"rank_{rank}.pt.trace.json.gz"
        ).is_file()
