# SPDX-License-Identifier: Apache-2.0
"""A run that stops and goes on is, bit for bit, the run that did not stop."""

import shutil

import pytest
import torch

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import OptimizerConfig
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to, tensors_of

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SHARDED, WHOLE = {"use_distributed_optimizer": True}, {"use_distributed_optimizer": False}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
TIED = {"share_embeddings_and_output_weights": True}
BF16 = {"mixed_precision": "bf16_mixed"}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 32,
}
EXPERTS |= {"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.0}

# The scale doubles after every second step, so that it is on its way when the run stops.
GROWING_SCALE = OptimizerConfig(
    lr=1e-2, weight_decay=0.1, clip_grad=0.5, initial_loss_scale=1024, loss_scale_window=2
)

LAYOUTS = {
    "tp2_sp": {"model": {**TP2, "sequence_parallel": True}},
    "pp2": {"model": PP2},
    "pp2_vp2": {"model": {**PP2, "virtual_pipeline_model_parallel_size": 2}},
    "cp2": {"model": {"context_parallel_size": 2}},
    "cp2_ring": {
        "model": {"context_parallel_size": 2, "cp_comm_type": "p2p", "attention_dropout": 0.0}
    },
    "dp2_sharded": {"ddp": SHARDED},
    "dp2_whole": {"ddp": WHOLE},
    "dp2_overlap": {"ddp": OVERLAP},
    "dp2_bf16": {"mixed_precision": "bf16_mixed", "ddp": SHARDED},
    "dp2_bf16_overlap": {"mixed_precision": "bf16_mixed", "ddp": OVERLAP},
    "tp2_sp_bf16_whole": {
        "mixed_precision": "bf16_mixed",
        "model": {**TP2, "sequence_parallel": True},
        "ddp": WHOLE,
    },
    "dp2_fp16": {"mixed_precision": "fp16_mixed", "ddp": SHARDED, "optimizer": GROWING_SCALE},
    "pp2_fp16_whole": {
        "mixed_precision": "fp16_mixed",
        "model": PP2,
        "ddp": WHOLE,
        "optimizer": GROWING_SCALE,
    },
    "ep2": {"model": {**EXPERTS, "expert_model_parallel_size": 2}},
    "pp2_tied": {"model": {**PP2, "share_embeddings_and_output_weights": True}},
}


# What others here prove together: in CI it would be the same twice.
COVERED = {"tp2_sp", "pp2", "dp2_sharded", "dp2_whole", "dp2_overlap", "dp2_bf16", "pp2_fp16_whole"}
COVERED |= {
    "dp2_bf16_overlap",
    "pp2_tied",
    "tp2_to_pp2",
    "dp2_sharded_to_whole",
    "tied_dp2_to_pp2",
    "dp2_to_cp2",
}


def _each(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in COVERED)) for name in names]


@pytest.mark.parametrize("name", _each(LAYOUTS))
def test_a_resumed_run_is_the_undisturbed_one(two_workers, tmp_path, name):
    arguments = {**LAYOUTS[name], "model": {**DROPOUT, **LAYOUTS[name].get("model", {})}}
    undisturbed, resumed = _both(two_workers, tmp_path, arguments, arguments)
    for rank in range(two_workers.size):
        for part in undisturbed[rank]:
            assert resumed[rank][part] == undisturbed[rank][part], (rank, part)
    assert resumed[0]["progress"]["skipped_steps"] <= 2  # fp16 may find its scale too high


def test_another_optimizer_resumes_too(two_workers, tmp_path):
    arguments = {"optimizer": OptimizerConfig(optimizer="sgd", lr=1e-2), "ddp": WHOLE}
    undisturbed, resumed = _both(two_workers, tmp_path, arguments, arguments)
    assert resumed == undisturbed


def test_saving_disturbs_nothing(two_workers, tmp_path):
    arguments = {"mixed_precision": "bf16_mixed", "ddp": OVERLAP, "model": DROPOUT}
    silent = two_workers.run(run_to, None, STEPS, arguments)
    assert (
        two_workers.run(run_to, tmp_path, STEPS, {**arguments, "checkpoint": {"save_interval": 1}})
        == silent
    )


def test_an_overlapped_gather_saves_whole_weights(two_workers, tmp_path):
    saved = {}
    for name, ddp in (("overlap", OVERLAP), ("plain", WHOLE)):
        two_workers.run(
            run_to, tmp_path / name, 2, {"ddp": ddp, "checkpoint": {"save_interval": 2}}
        )
        saved[name] = tensors_of(paths.resolve(tmp_path / name))
    for key, value in saved["plain"].items():
        if not key.startswith("optimizer."):
            # stale weights would be off by a step: 1e-3
            assert torch.allclose(saved["overlap"][key], value, rtol=0, atol=1e-6), key


def test_ranks_that_hold_the_same_share_the_writing(two_workers, tmp_path):
    two_workers.run(run_to, tmp_path, 2, {"ddp": WHOLE})
    sizes = [
        path.stat().st_size for path in sorted(paths.iteration_dir(tmp_path, 2).glob("__*.distcp"))
    ]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes), sizes


def _both(pool, root, before, after):
    """The results of a run that saves at step 3, and of the one that goes on from there."""
    undisturbed = pool.run(run_to, root, STEPS, {**before, "checkpoint": {"save_interval": 3}})
    paths.write_tracker(root, 3)
    return undisturbed, pool.run(run_to, root, STEPS, after)


RESHARDINGS = {
    "tp2_to_pp2": ({"model": TP2}, {"model": PP2}),
    "tp2_sp_to_pp2": ({"model": {**TP2, "sequence_parallel": True}}, {"model": PP2}),
    "dp2_to_tp2": ({"ddp": SHARDED}, {"model": TP2}),
    "pp2_vp2_to_dp2": (
        {"model": {**PP2, "virtual_pipeline_model_parallel_size": 2}},
        {"ddp": OVERLAP},
    ),
    "dp2_sharded_to_whole": ({"ddp": SHARDED}, {"ddp": WHOLE}),
    "dp2_to_cp2": ({"ddp": WHOLE}, {"model": {"context_parallel_size": 2}, "ddp": SHARDED}),
    "tied_dp2_to_pp2": ({"model": TIED, "ddp": SHARDED}, {"model": {**TIED, **PP2}}),
    "ep2_to_pp2": (
        {"model": {**EXPERTS, "expert_model_parallel_size": 2}},
        {"model": {**EXPERTS, **PP2}},
    ),
    "bf16_tp2_to_dp2": ({**BF16, "model": TP2}, {**BF16, "ddp": SHARDED}),
}


@pytest.mark.parametrize("name", _each(RESHARDINGS))
def test_a_run_goes_on_under_another_layout(two_workers, tmp_path, name):
    _goes_on(two_workers, tmp_path, *RESHARDINGS[name])


def test_a_run_of_four_goes_on_under_another_layout(four_workers, tmp_path):
    _goes_on(
        four_workers,
        tmp_path,
        {"model": {**TP2, **PP2}},
        {"model": {**TP2, "sequence_parallel": True}, "ddp": SHARDED},
    )


def _first_draw(root, arguments):
    """What this rank draws from the generator of hidden dropout where it goes on."""
    drawn, peek = [], Callback()
    peek.on_train_start = lambda context: drawn.append(
        torch.rand(1, device=torch.cuda.current_device()).item()
    )
    run_to(root, STEPS, {**arguments, "extra": [peek]})
    return drawn


def test_stages_draw_apart_after_a_change_of_the_layout(two_workers, tmp_path):
    two_workers.run(run_to, tmp_path, 3, {"model": DROPOUT, "ddp": SHARDED})
    first, second = two_workers.run(_first_draw, tmp_path, {"model": {**DROPOUT, **PP2}})
    assert first != second


TP2_SP = {**TP2, "sequence_parallel": True}
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {**EXPERTS, "expert_model_parallel_size": 2}
MATRICES = {
    "of two": {
        "dp2": {"ddp": SHARDED},
        "tp2": {"model": TP2},
        "tp2_sp": {"model": TP2_SP},
        "pp2": {"model": PP2},
        "pp2_vp2": {"model": VP2},
        "cp2": {"model": CP2},
    },
    "of two with experts": {
        "dp2": {"model": EXPERTS, "ddp": SHARDED},
        "ep2": {"model": EP2, "ddp": SHARDED},
        "tp2_sp": {"model": {**EXPERTS, **TP2_SP}},
        "tp2_sp_ep2": {"model": {**EP2, **TP2_SP, "expert_tensor_parallel_size": 1}},
        "pp2": {"model": {**EXPERTS, **PP2}},
    },
    "of four": {
        "dp4": {"ddp": SHARDED},
        "dp2_tp2": {"model": TP2_SP, "ddp": SHARDED},
        "dp2_pp2_vp2": {"model": VP2, "ddp": SHARDED},
        "tp2_pp2": {"model": {**TP2, **PP2}},
        "tp2_cp2": {"model": {**TP2_SP, **CP2}},
        "pp2_cp2": {"model": {**PP2, **CP2}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matrix", "source"),
    [(matrix, source) for matrix, layouts in MATRICES.items() for source in layouts],
)
def test_a_run_goes_on_under_every_other_layout(request, tmp_path, matrix, source):
    pool = request.getfixturevalue("four_workers" if matrix == "of four" else "two_workers")
    layouts = {
        name: {**layout, "train": {"micro_batch_size": 1}}
        for name, layout in MATRICES[matrix].items()
    }
    saving = {**layouts[source], "checkpoint": {"save_interval": 3}}
    undisturbed = pool.run(run_to, tmp_path / "run", STEPS, saving)
    paths.remove(tmp_path / "run", STEPS)
    paths.write_tracker(tmp_path / "run", 3)
    for target in sorted(layouts.keys() - {source}):
        shutil.copytree(tmp_path / "run", tmp_path / target)
        _assert_it_went_on(
            undisturbed, pool.run(run_to, tmp_path / target, STEPS, layouts[target]), 1e-6
        )


def _goes_on(pool, root, before, after):
    # fp32: what changing the layout costs a run of one layout, too; bf16: one rounding of an activation
    tolerance = 4e-3 if "mixed_precision" in before else 1e-6
    _assert_it_went_on(*_both(pool, root, before, after), tolerance)


def _assert_it_went_on(undisturbed, resumed, tolerance):
    for step, loss in undisturbed[0]["losses"].items():
        assert abs(resumed[0]["losses"][step] - loss) <= tolerance, step
    for part in ("progress", "schedule"):
        assert resumed[0][part] == undisturbed[0][part]
    for step in range(4, STEPS + 1):
        assert _samples(resumed, step) == _samples(undisturbed, step), step
    # Trained weights, not fresh ones: the first loss after the change is far below that of step 1.
    assert undisturbed[0]["losses"][4] < undisturbed[0]["losses"][1] - 0.05


def _samples(results, step):
    """The samples of a step: model-parallel ranks draw the same ones, data-parallel ranks share them."""
    return {tuple(row) for result in results for row in result["tokens"][step]}
