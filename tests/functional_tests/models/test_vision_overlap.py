# SPDX-License-Identifier: Apache-2.0
"""One rank has images and the other text alone, while communication overlaps with computation."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.training.optim.optimizer import build_optimizer
from tests.families.vision import harness

PLAIN = {}
OVERLAPPED = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}


def train(case, ddp, fsdp2=False, steps=3):
    """The mean loss of each step over two samples, the second without an image."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    wrap = DistributedDataParallelConfig(**ddp)
    model = bridge.to_megatron_provider().provide_distributed_model(
        ddp_config=wrap, use_torch_fsdp2=fsdp2
    )
    distributed = {
        name: getattr(wrap, name) for name in ("use_distributed_optimizer", "overlap_param_gather")
    }
    optimizer = build_optimizer(
        OptimizerConfig(lr=1e-3, min_lr=1e-3, weight_decay=0.0, **distributed), model
    )
    rank, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    samples = case.samples(bridge.hf_config)[1:3][rank::size]
    return [step(case, model, optimizer, samples) for _ in range(steps)]


def step(case, model, optimizer, samples):
    (chunk,) = model
    if hasattr(chunk, "zero_grad_buffer"):
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    total = 0.0
    for index, sample in enumerate(samples):
        batch, media = harness.this_rank(sample, case.row)
        logits = chunk(
            input_ids=batch["ids"],
            position_ids=batch["positions"],
            attention_mask=None,
            media=media,
        )
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / len(samples)
        if index < len(samples) - 1 and hasattr(chunk, "no_sync"):
            with chunk.no_sync():
                loss.backward()
        else:
            loss.backward()
        total += loss.detach()
    finalize_model_grads([chunk])
    optimizer.step()
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    assert unwrap(chunk).vision is not None
    return (total / parallel_state.get_data_parallel_world_size()).item()


@pytest.fixture(scope="module")
def alone(vision_case):
    cases = {}

    def losses(name):
        if name not in cases:
            cases[name] = train(vision_case(name), PLAIN)
        return cases[name]

    return losses


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava"])
@pytest.mark.parametrize(
    ("ddp", "fsdp2"), [(OVERLAPPED, False), (PLAIN, True)], ids=["overlapped", "fsdp2"]
)
def test_the_losses_are_those_of_one_process(
    two_workers, run_in_process, vision_case, alone, name, ddp, fsdp2
):
    found = two_workers.run(train, vision_case(name), ddp, fsdp2)
    assert found == [pytest.approx(alone(name), abs=1e-4)] * 2
    assert alone(name)[2] < alone(name)[0]


def test_matrices_that_only_some_samples_use(two_workers, run_in_process, vision_case, alone):
    """Nothing here is a video, whose matrix still gets a gradient. FSDP2 does not take hybrid models."""
    found = two_workers.run(train, vision_case("nemotron_h_omni"), OVERLAPPED)
    assert found == [pytest.approx(alone("nemotron_h_omni"), abs=1e-4)] * 2
