# SPDX-License-Identifier: Apache-2.0
"""Set-up and whole training steps of one rank on the meta device, in the place of a GPU.

A tensor that is made on the CPU raises an error when it meets the others, and so does whatever reads a number on
the host. Of a step, only the gradient norm does so; other ranks answer nothing.
"""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.bridge.backends.cpu.without_memory import one_rank
from megatron.bridge.training import setup
from megatron.bridge.training.config import DistributedDataParallelConfig, OptimizerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.optim import optimizer
from megatron.bridge.training.step.forward_step import bind_state
from tests.toy_run import SEQUENCE, toy_config
from tests.workers import leave

OVERLAP = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}
SHARDED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES = {
    "alone": (0, 1, {}),
    "fp32": (0, 1, {"mixed_precision": "fp32"}),
    "tensor parallel": (1, 2, {"model": SHARDED}),
    "first stage": (0, 2, {"model": {"pipeline_model_parallel_size": 2}}),
    "last stage": (1, 2, {"model": {"pipeline_model_parallel_size": 2}}),
    "overlapped": (1, 4, {"ddp": OVERLAP, "model": SHARDED}),
    "recomputed": (
        0,
        1,
        {
            "model": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        },
    ),
    "sgd": (0, 1, {"optimizer": OptimizerConfig(optimizer="sgd", lr=0.1)}),
}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    leave()  # an earlier test in this process may have left its group
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module, *_: module.to("meta"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor.to("meta"))
    monkeypatch.setattr(
        "megatron.core.optimizer.optimizer.get_grad_norm_fp32", lambda *_, **__: 1.0
    )
    monkeypatch.setattr(
        "torch.distributed.batch_isend_irecv", lambda *_: []
    )  # no backend sends tensors without numbers
    # answered in the first step and kept
    monkeypatch.setattr(MegatronOptimizer, "has_grad_norm_group", lambda *_: False)


def batches():
    """Batches on the host, of which every third token is trained."""
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    mask = (torch.arange(2 * SEQUENCE).view(2, -1) % 3 == 0).float()
    while True:
        yield {
            "tokens": ids,
            "labels": ids,
            "loss_mask": mask,
            "position_ids": ids,
            "attention_mask": None,
        }


def steps(rank, size, model=None, ddp=None, spoil=None, **blocks):
    """Two steps of one rank: whether each updated the weights."""
    blocks = {"mixed_precision": "bf16_mixed", **blocks}
    config = toy_config(
        model={"num_layers": 2, "use_cpu_initialization": False, **(model or {})},
        ddp=DistributedDataParallelConfig(**(ddp or {})),
        **blocks,
    )
    config = config.resolve(world_size=size).config
    with one_rank(rank, size), torch.device("cpu"):
        try:
            setup.initialize(config)
            chunks = setup.build_model(config)
            built = optimizer.build_optimizer(config.optimizer, chunks)
            setup.connect(chunks, built, config.ddp, config.dist.align_grad_reduce)
            tensors = [*chunks[0].module.parameters(), *chunks[0].module.buffers()]
            assert {tensor.device.type for tensor in tensors} == {"meta"}
            if spoil:
                spoil(chunks[0])
            return [step(chunks, built) for _ in range(2)]
        finally:
            parallel_state.destroy_model_parallel()


def step(chunks, built):
    for chunk in chunks:
        chunk.zero_grad_buffer()
    built.zero_grad()
    get_forward_backward_func()(
        forward_step_func=bind_state(forward_step, None),
        data_iterator=[batches() for _ in chunks],
        model=chunks,
        num_microbatches=4,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=False,
    )
    return built.step()[0]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_made_or_read_on_the_cpu(case):
    rank, size, blocks = CASES[case]
    assert steps(rank, size, **blocks) == [True, True]


def test_reading_a_number_would_be_found():
    def reads(chunk):
        chunk.register_forward_hook(lambda module, inputs, out: out * out.sum().item())

    with pytest.raises(RuntimeError, match="meta"):
        steps(0, 1, spoil=reads)
