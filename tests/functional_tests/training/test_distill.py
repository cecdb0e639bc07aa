# SPDX-License-Identifier: Apache-2.0
"""A student's run is that of one process, whatever the layout."""

import json

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from megatron.bridge.data.config import DatasetRequest
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    DistributedInitConfig,
    ValidationConfig,
)
from megatron.bridge.training.distillation.cache_teacher import precompute
from tests.functional_tests.data.test_packed_gradients import LENGTHS, dataset
from tests.toy_distill import HIDDEN, LEARN, run_student, save_teacher, student_config
from tests.toy_run import VOCABULARY, whole_weights
from tests.workers import forget_model_parallel, leave

PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
TP2 = {"tensor_model_parallel_size": 2}
TOP = {**LEARN, "top_k": 8}  # the 8th and 9th differ by 4e-4 at least: rounding does not swap them
CP2 = {"context_parallel_size": 2}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 32,
}
EXPERTS |= {"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.0}
CASES = {
    "sp2 hidden": (HIDDEN, {**TP2, "sequence_parallel": True}),
    "tp2 top": (TOP, TP2),
    "pp2 hidden": (HIDDEN, PP2),
    "vp2": (LEARN, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2 hidden": (HIDDEN, {}),
    "cp2 hidden": (HIDDEN, CP2),
    "FSDP2": (LEARN, {}, {"dist": DistributedInitConfig(use_torch_fsdp2=True)}),
    "Megatron-FSDP": (LEARN, {}, {"ddp": DistributedDataParallelConfig(use_megatron_fsdp=True)}),
}
FOUR = {
    "tp2 pp2 hidden": (HIDDEN, {**TP2, **PP2, "sequence_parallel": True}),
    "pp4 hidden": (HIDDEN, {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.float32}),
}
STEPS = 3
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
FSDP2 = {"dist": DistributedInitConfig(use_torch_fsdp2=True)}
MEGATRON_FSDP = {"ddp": DistributedDataParallelConfig(use_megatron_fsdp=True)}
SHARDED_STAGES = {
    "pp2 FSDP2": (LEARN, PP2, FSDP2),
    "vp2 FSDP2": (TOP, VP2, FSDP2),
    "pp2 Megatron-FSDP": (LEARN, PP2, MEGATRON_FSDP),
    "vp2 Megatron-FSDP": (TOP, VP2, MEGATRON_FSDP),
}


def run(teacher, learn, layout, **blocks):
    record, losses = run_student(
        teacher, learn, model=dict(layout), train={"train_iters": STEPS}, **blocks
    )
    return record, losses.train, losses.valid


def run_all(teacher, cases):
    return {name: run(teacher, *case[:2], **dict(*case[2:])) for name, case in cases.items()}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def alone(teacher):
    """The runs of one process."""
    torch.set_num_threads(1)
    found = {
        name: run(teacher, learn, {})
        for name, learn in (("hidden", HIDDEN), ("top", TOP), ("kl", LEARN))
    }
    leave()
    return found


def compare(ranks, alone, cases):
    for name, (learn, *_) in cases.items():
        expected, train, valid = alone[
            "hidden" if learn is HIDDEN else "top" if learn is TOP else "kl"
        ]
        for rank in ranks:
            for found, wanted in zip(
                [*rank[name][1], *rank[name][2]], [*train, *valid], strict=True
            ):
                assert found == pytest.approx(wanted, rel=2e-6), name
        compare_weights([rank[name][0] for rank in ranks], expected, name)


def compare_weights(records, expected, name):
    weights, reference = whole_weights(records), whole_weights([expected])
    assert weights.keys() == reference.keys()
    for key, weight in reference.items():
        assert (weights[key] - weight).abs().max() < 2e-5, f"{name} {key}"


def test_losses_are_told_apart(alone):
    names = {name: set(train[0]) for name, (_, train, _) in alone.items()}
    assert names == {
        "hidden": {"lm loss", "kl loss", "hidden loss"},
        "top": {"lm loss", "kl loss"},
        "kl": {"lm loss", "kl loss"},
    }
    _, train, valid = alone["hidden"]
    assert set(valid[-1]) == set(train[-1])


def test_two_processes(teacher, alone, two_workers):
    compare(two_workers.run(run_all, teacher, CASES), alone, CASES)


def test_four_processes(teacher, alone, four_workers):
    compare(four_workers.run(run_all, teacher, FOUR), alone, FOUR)


def test_stages_whose_weights_are_sharded(teacher, alone, four_workers):
    compare(four_workers.run(run_all, teacher, SHARDED_STAGES), alone, SHARDED_STAGES)


def in_half_precision(teacher):
    return run(teacher, HIDDEN, PP2, mixed_precision="bf16_mixed")[1]


def test_half_precision_over_stages(teacher, two_workers):
    """What is sent is in half precision anyway: nothing is rounded twice."""
    torch.set_num_threads(1)
    expected = run(teacher, HIDDEN, {}, mixed_precision="bf16_mixed")[1]
    leave()
    assert two_workers.run(in_half_precision, teacher) == [expected] * 2


def share_experts(teacher):
    return run(teacher, HIDDEN, {**EXPERTS, "expert_model_parallel_size": 2})


def test_experts_over_ranks(tmp_path, two_workers):
    """Of the student and of the teacher."""
    torch.manual_seed(0)
    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 8,
    }
    attention = {
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = MixtralConfig(**sizes, **attention, initializer_range=0.15, sliding_window=None)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    expected, train, _ = run(tmp_path, HIDDEN, EXPERTS)
    leave()
    ranks = two_workers.run(share_experts, tmp_path)
    for rank in ranks:
        assert rank[1] == [pytest.approx(step, rel=2e-6) for step in train]
    compare_weights([rank[0] for rank in ranks], expected, "ep2")


# ------------------------------------------------------------------------------------------------------- packed


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Prompts and completions of very different lengths; the prompts are not learnt."""
    folder = tmp_path_factory.mktemp("samples")
    numbers = [
        [" ".join(str(7 * place % 90) for place in range(length)) for length in both]
        for both in LENGTHS
    ]
    lines = [
        json.dumps({"prompt": prompt + " ", "completion": answer}) for prompt, answer in numbers
    ]
    (folder / "training.jsonl").write_text("\n".join(lines))
    return folder


def packed_run(teacher, samples, kind, layout, learn):
    data = dataset(samples, kind, multiple=4 if layout.get("context_parallel_size") else None)
    rows = len(data.build(DatasetRequest((1, 0, 0), NullTokenizer(VOCABULARY))).train.rows)
    train = {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": rows}
    config = {
        "model": dict(layout),
        "train": train,
        "dataset": data,
        "validation": ValidationConfig(),
    }
    if "cache" in learn:
        precompute(student_config(teacher, learn, **config | {"model": {}}))
        forget_model_parallel()
    record, losses = run_student(teacher, learn, **config)
    return record, losses.train


def test_packed_samples_learn_what_padded_ones_do(teacher, samples, tmp_path, two_workers):
    expected, losses = packed_run(teacher, samples, "padded", {}, HIDDEN)
    alone, top = packed_run(teacher, samples, "padded", {}, TOP)
    leave()
    cached = {**TOP, "cache": str(tmp_path)}
    for learn, layout, reference, wanted in (
        (HIDDEN, CP2, expected, losses),
        (HIDDEN, PP2, expected, losses),
        (cached, CP2, alone, top),
    ):
        ranks = two_workers.run(packed_run, teacher, samples, "packed", layout, learn)
        assert ranks[0][1] == [pytest.approx(wanted[0], rel=2e-6)]
        compare_weights([rank[0] for rank in ranks], reference, layout)


# ------------------------------------------------------------------------------------------------------- cached


def write(teacher, cache, layout):
    precompute(
        student_config(
            teacher, {**TOP, "cache": cache}, model=dict(layout), train={"train_iters": STEPS}
        )
    )


def test_a_cache_is_read_in_another_layout_than_its_own(teacher, alone, tmp_path, two_workers):
    expected, train, _ = alone["top"]
    for name, theirs, ours in (("tp2", TP2, PP2), ("pp2", PP2, TP2), ("dp2", {}, CP2)):
        cache = str(tmp_path / name)
        two_workers.run(write, teacher, cache, theirs)
        ranks = two_workers.run(run, teacher, {**TOP, "cache": cache}, ours)
        for rank in ranks:
            assert rank[1] == [pytest.approx(step, rel=2e-6) for step in train], name
        compare_weights([rank[0] for rank in ranks], expected, name)
