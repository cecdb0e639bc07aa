# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: replayed steps, what is captured, what is refused, and random states."""

from functools import partial

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import cuda_graphs as core_graphs

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    LoggerConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.initialize.rank_state import random_states, set_random_states
from megatron.bridge.utils.errors import UserError
from tests import recorded_graph, toy_samples
from tests.toy_run import SEQUENCE, VOCABULARY, initialize_by_name, run_toy, toy_config
from tests.workers import leave

LENGTHS = {"train": {"train_iters": 5}}
CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall"}


class CaptureAfter(Callback):
    """Turns graphs on after the model was built, because a machine without a GPU refuses them."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_start(self, context):
        context.config.model.cuda_graph_impl = "full_iteration"
        context.config.model.cuda_graph_warmup_steps = self.steps


@pytest.mark.sampled
def test_replayed_steps_of_experts_equal_usual_ones(monkeypatch):
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    usual = run_toy(LENGTHS | {"model": {**EXPERTS, **CAPACITY, **balanced}})
    recorded_graph.install(monkeypatch)
    found = run_toy(
        LENGTHS | {"model": {**EXPERTS, **CAPACITY, **balanced}}, callbacks=[CaptureAfter(1)]
    )
    assert found.numbers == usual.numbers
    assert len(set(found.further["load_balancing_loss"])) == 5


def masked_samples(folder):
    """Samples whose share in the loss differs from step to step."""
    blocks = {"dataset": toy_samples.dataset(folder, "padded")}
    blocks["dataset"].do_validation = blocks["dataset"].do_test = False
    train = {"train_iters": 5, "micro_batch_size": 1, "global_batch_size": 2}
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
    model = {**EXPERTS, **CAPACITY, **balanced}
    return {"model": model, "train": train, "validation": ValidationConfig(), **blocks}


def test_replayed_router_losses_follow_the_masks_of_each_step(monkeypatch, tmp_path):
    config = masked_samples(toy_samples.write_samples(tmp_path))
    fixed_shapes = partial(forward_step, all_tokens=True)
    usual = run_toy(config, fixed_shapes)
    recorded_graph.install(monkeypatch)
    found = run_toy(masked_samples(tmp_path), fixed_shapes, [CaptureAfter(1)])
    assert found.numbers == usual.numbers


@pytest.mark.sampled
def test_replayed_steps_equal_usual_steps(monkeypatch):
    """Training is captured in step 2, and validation in its second call, the test; a second run captures anew."""
    usual = run_toy(LENGTHS)
    graphs = recorded_graph.install(monkeypatch)
    for run in range(1, 3):
        found = run_toy(LENGTHS, callbacks=[CaptureAfter(1)])
        assert found.numbers == usual.numbers
        assert [graph.replays for graph in graphs] == run * [4, 1]
    assert FullCudaGraphWrapper.cuda_graph == {"training": None, "validation": None}


def test_a_number_that_the_host_reads_cannot_be_captured(monkeypatch):
    recorded_graph.install(monkeypatch)
    check = {"ddp": DistributedDataParallelConfig(check_for_nan_in_grad=True)}
    try:
        with pytest.raises(RuntimeError, match="the host waits"):
            run_toy(LENGTHS | check, callbacks=[CaptureAfter(1)])
    finally:
        leave()


@pytest.fixture
def graph_safe_tracker():
    """Megatron-Core's tracker as it is for graphs; its states are those of the CPU."""
    toy_config().model.initialize_model_parallel(seed=1)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.use_cudagraphable_rng = True
    yield tracker
    tracker.use_cudagraphable_rng = False
    core_graphs.delete_cuda_graphs()
    leave()


def local_losses(kind):
    """Losses of eight microbatches in four steps, through Megatron-Core's schedule and plain gradient descent."""
    config = toy_config(model={"num_layers": 2, "calculate_per_token_loss": False}).model.resolved()
    config.cuda_graph_impl = kind
    bare = config.build_chunks()
    initialize_by_name(bare)
    chunk = DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(), module=bare[0]
    )
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(4):
        chunk.zero_grad_buffer()
        tokens = torch.randint(0, VOCABULARY, (2, 2, SEQUENCE), generator=generator)
        sizes = {
            "num_microbatches": 2,
            "seq_length": SEQUENCE,
            "micro_batch_size": 2,
            "forward_only": False,
        }
        found += forward_backward_no_pipelining(
            forward_step_func=next_token_losses, data_iterator=iter(tokens), model=[chunk], **sizes
        )
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.sub_(0.1 * parameter.main_grad)
    return found


def next_token_losses(batches, model):
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), losses.detach().mean().item())


def test_layers_that_are_replayed_equal_layers_that_are_not(graph_safe_tracker, monkeypatch):
    """Forward and backward of two layers are captured after the first step."""
    usual = local_losses("none")
    graphs = recorded_graph.install(monkeypatch)
    assert local_losses("local") == usual
    assert [graph.replays for graph in graphs] == [6, 6, 6, 6]


def test_random_states_stay_in_the_generators_that_a_graph_holds(graph_safe_tracker, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    monkeypatch.setattr(graph_safe_tracker, "states_", {"model-parallel-rng": generator})
    states = random_states()
    assert isinstance(states["tracker"]["model-parallel-rng"], torch.Tensor)
    drawn = torch.rand(3, generator=generator)
    set_random_states(states)
    assert graph_safe_tracker.states_["model-parallel-rng"] is generator
    assert torch.equal(torch.rand(3, generator=generator), drawn)


REFUSED = {
    "growing batches": (
        "local",
        {"train": {"rampup_batch_size": [4, 4, 80]}},
        "rampup_batch_size=null",
    ),
    "teacher of tokens": ("local", {"model": {"mtp_num_layers": 1}}, "mtp_num_layers=null"),
    "whole layers": (
        "local",
        {"model": {"recompute_granularity": "full"}},
        "recompute_granularity=selective",
    ),
    "free experts": ("local", {"model": EXPERTS}, "cuda_graph_modules without moe"),
    "free experts in all": (
        "full_iteration",
        {"model": EXPERTS},
        "moe_pad_expert_input_to_capacity=true",
    ),
    "modules": (
        "full_iteration",
        {"model": {"cuda_graph_modules": ["attn"]}},
        r"cuda_graph_modules=\[\]",
    ),
    "timers": (
        "full_iteration",
        {"logger": LoggerConfig(timing_log_level=1)},
        "timing_log_level=0",
    ),
    "waiting stages": (
        "full_iteration",
        {"model": {"pipeline_model_parallel_size": 2}},
        "batch_p2p_sync=false",
    ),
    "engine": ("transformer_engine", {}, "use local or full_iteration"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_repeat_is_refused(name):
    kind, settings, way_out = REFUSED[name]
    config = toy_config(
        **{**settings, "model": {**settings.get("model", {}), "cuda_graph_impl": kind}}
    )
    with pytest.raises(UserError, match=f"model.cuda_graph_impl={kind}.*{way_out}"):
        config.resolve(2)


@pytest.mark.parametrize("kind", ["local", "full_iteration"])
def test_graphs_need_a_gpu(kind):
    config = toy_config(model={"cuda_graph_impl": kind})
    assert config.resolve(1).config.model.cuda_graph_impl == kind
    with pytest.raises(UserError, match=f"model.cuda_graph_impl={kind} needs a GPU.*use none"):
        config.resolve()


def test_experts_of_fixed_capacity_can_be_captured():
    config = toy_config(model={**EXPERTS, **CAPACITY, "cuda_graph_impl": "full_iteration"})
    assert config.resolve(1)
