# SPDX-License-Identifier: Apache-2.0
"""QK clipping bounds attention scores, alike under any layout, and a run resumes with it."""

import pytest
import torch
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

from megatron.bridge.backends.attention.block_mask import (
    AttentionWindow,
    PackedSegment,
    packed_spans,
)
from megatron.bridge.backends.attention.largest_scores import largest_scores
from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import DistributedDataParallelConfig, OptimizerConfig
from megatron.bridge.training.optim.qk_clip import clip, clipped_attentions
from tests.functional_tests.checkpoint.runs import run_to
from tests.parity import LATENT
from tests.toy_run import run_toy
from tests.workers import leave

THRESHOLD = 0.02
CLIPPED = {"qk_clip": True, "qk_clip_threshold": THRESHOLD}
WHOLE = DistributedDataParallelConfig(use_distributed_optimizer=False)
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
}


def train(model):
    return run_toy({"model": {**CLIPPED, **model}, "ddp": WHOLE})


@pytest.fixture(scope="module", params=[{}, LATENT], ids=["grouped", "latent"])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def single(model):
    torch.set_num_threads(1)
    record = train(model)
    leave()
    return record


def test_it_changes_a_run(model, single, run_in_process):
    free = run_toy({"model": model, "ddp": WHOLE})
    assert free.losses[0] == single.losses[0]
    assert free.losses[1] != single.losses[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_clip_alike(two_workers, model, single, layout):
    for record in two_workers.run(train, {**model, **LAYOUTS[layout]}):
        assert record.losses == pytest.approx(single.losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(single.grad_norms, rel=1e-4)


class Bound(Callback):
    """Scores of one batch before and after clipping to half of the largest."""

    def on_train_step_end(self, context):
        layer = clipped_attentions(context.model)[0]
        tokens = torch.arange(24)[None]

        def largest():
            layer.core_attention.current_max_attn_logits = None
            with torch.no_grad():
                context.model[0](tokens, tokens, None)
            return layer.core_attention.current_max_attn_logits

        self.before = largest().clone()
        layer.config.qk_clip_threshold = float(self.before.max()) / 2
        with torch.no_grad():
            clip(layer)
        self.after = largest()
        layer.core_attention.current_max_attn_logits = None


@pytest.mark.parametrize(
    "model", [{}, {"add_qkv_bias": True}, LATENT], ids=["", "biases", "latent"]
)
def test_the_largest_score_of_a_head_becomes_the_threshold(model, run_in_process):
    bound = Bound()
    config = {"model": {**CLIPPED, **model, "qk_clip_threshold": 1000.0}, "ddp": WHOLE}
    run_toy(config | {"train": {"train_iters": 1}}, callbacks=[bound])
    threshold = float(bound.before.max()) / 2
    assert float(bound.after.max()) == pytest.approx(threshold, rel=1e-4)
    assert all(bound.after <= bound.before)


@pytest.mark.parametrize("window", [None, (5, 0)])
def test_scores_of_packed_rows(window):
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(40, 1, heads, 8, generator=generator) for heads in (4, 2))
    segments = [PackedSegment(0, 11, 12), PackedSegment(12, 28, 28)]
    left = None if window is None else window[0]
    options = (packed_spans(segments, segments), AttentionWindow(left, 0), 0.3)
    scores = torch.einsum("shd,thd->hst", query[:, 0], key[:, 0].repeat_interleave(2, dim=1)) * 0.3
    row = torch.arange(40)
    seen = row[:, None] >= row
    if window is not None:
        seen &= row[:, None] - row <= left
    seen &= (row[:, None] < 12) == (row < 12)
    seen &= (row[:, None] != 11) & (row != 11)  # padding
    expected = scores.masked_fill(~seen, -torch.inf).amax((1, 2))
    torch.testing.assert_close(largest_scores(query, key, *options), expected)


@pytest.mark.skipif(not HAVE_EMERGING_OPTIMIZERS, reason="emerging-optimizers is not installed")
@pytest.mark.parametrize("by_layer", [False, True])
def test_muon_resumes_with_clipping(two_workers, tmp_path, by_layer):
    optimizer = OptimizerConfig(
        optimizer="muon", lr=1e-2, use_layer_wise_distributed_optimizer=by_layer
    )
    arguments = {
        "optimizer": optimizer,
        "mixed_precision": "bf16_mixed",
        "model": CLIPPED,
        "train": {"micro_batch_size": 1},
    }
    undisturbed = two_workers.run(
        run_to, tmp_path, 6, {**arguments, "checkpoint": {"save_interval": 3}}
    )
    paths.write_tracker(tmp_path, 3)
    assert two_workers.run(run_to, tmp_path, 6, arguments) == undisturbed
    assert undisturbed[0]["losses"] == undisturbed[1]["losses"]
