# SPDX-License-Identifier: Apache-2.0
"""Every family under layouts of two and four processes: transformers' greedy tokens and log-probabilities.

By default each kind of state and each feature of a layer runs under one layout. The others are slow: one process
has proven every row, and the layouts of training share their layers.
"""

import pytest

from megatron.bridge.backends.decoding.op_recorder import record
from megatron.bridge.inference import decoding_graphs
from megatron.bridge.inference.engine import Engine
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


@pytest.mark.parametrize(
    ("name", "layout", "count", "obstacle"),
    [
        ("llama_tied", "tp2", 2, None),  # of 16 rows, and of 8
        ("granitemoehybrid_dense", "tp2", 2, None),
        ("qwen3_moe", "ep2", 1, None),  # each rank has half of the texts
        ("llama_tied", "pp2", 0, "pipeline stages"),
    ],
)
def test_replayed_steps_of_two_ranks_have_the_same_bits(
    two_workers, family_case, name, layout, count, obstacle
):
    for reason, recordings, replayed, stepped in two_workers.run(
        replay_and_step, family_case(name), layout
    ):
        assert replayed == stepped
        assert obstacle is None if reason is None else reason.startswith(obstacle)
        assert len(recordings) == count


def replay_and_step(case, layout):
    """Run on every rank: what is replayed, and the texts with and without replay."""
    recordings, reasons = [], []
    sampled = [
        Sampling(max_new_tokens=6, logprobs=2, ignore_eos=True),
        Sampling(max_new_tokens=12, temperature=0.9, seed=3, n=9, ignore_eos=True),
        Sampling(max_new_tokens=16, logprobs=0, ignore_eos=True),
    ]
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            decoding_graphs, "record", lambda forward: recordings.append("") or record(forward)
        )
        for graphs in (True, False):
            config = decoding.engine_config(case, graphs=graphs)
            with Engine(decoding.decoder(case, layout), config) as engine:
                prompts = decoding.prompts(case.row.config["vocab_size"])
                requests = list(zip(prompts, sampled, strict=False))
                jobs = [job for request in requests for job in engine.submit(*request)]
                list(engine.run())
                reasons.append(engine.replay_obstacle)
            texts.append([(job.completion.tokens, job.completion.logprobs) for job in jobs])
    return reasons[0], recordings, *texts


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
