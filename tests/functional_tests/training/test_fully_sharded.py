# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism, both kinds: what ranks hold, and that checkpoints are those of any layout.

That it learns what one process learns is in ``tests/parity.py``.
"""

import filecmp
import json

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.backends.fsdp.sharded_rows import local_rows
from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
    ValidationConfig,
)
from megatron.bridge.training.optim.optimizer import torch_optimizers
from megatron.bridge.utils.console import console
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to, tensors_of
from tests.functional_tests.data.test_packed_recurrent import DELTA_NETS, MAMBA
from tests.parity import EP2, EXPERTS, LATENT, PP2, PP2_VP2
from tests.toy_models import make_llama
from tests.toy_run import run_toy, toy_config, whole_weights

FSDP2 = {"dist": DistributedInitConfig(use_torch_fsdp2=True)}
MEGATRON = {"ddp": {"use_megatron_fsdp": True}}
STATE = {"ddp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}}
GRADIENTS = {"ddp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}}
TP2 = {"tensor_model_parallel_size": 2}
MICRO = {"train": {"micro_batch_size": 1}}
BF16 = {"mixed_precision": "bf16_mixed"}
# On four ranks two hold nothing of the norms of heads, and one the end of a gate and the start of an up matrix.
UNEVEN = {"ffn_hidden_size": 63, "kv_channels": 2, "qk_layernorm": True}
# Megatron-FSDP's parts are multiples of 3 x 32 numbers, rows of both widths, and ends of parameters share one.
GAPS = {"ffn_hidden_size": 48, "kv_channels": 2, "qk_layernorm": True}


class Held(Callback):
    """Numbers of weights, gradients and optimizer state on this rank after a step."""

    def on_train_step_end(self, context):
        weights = [parameter for chunk in context.model for parameter in chunk.parameters()]
        state = [
            value
            for inner in torch_optimizers(context.optimizer)
            for values in inner.state.values()
            for name, value in values.items()
            if name != "step"
        ]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        self.found = [
            sum(local_rows(tensor).numel() for tensor in kind)
            for kind in (weights, gradients, state)
        ]


def hold(arguments):
    held = Held()
    run_to(None, 1, {**arguments, "extra": [held]})
    return held.found


@pytest.mark.parametrize("precision", ["bf16_mixed", pytest.param("fp32", marks=pytest.mark.slow)])
def test_each_rank_holds_its_share_of_everything(two_workers, run_in_process, precision):
    found = two_workers.run(hold, {**FSDP2, "mixed_precision": precision})
    alone = sum(
        weight.numel()
        for weight in whole_weights([run_toy({"train": {"train_iters": 1}})]).values()
    )
    assert found == [[alone // 2, alone // 2, alone]] * 2
    config = toy_config(mixed_precision=precision, **FSDP2)
    config = config.resolve(2).config
    memory = memory_per_rank(config, 2)[0]  # what a dry run says, in bytes of fp32
    assert [memory.parameters // 2, memory.gradients // 4, memory.optimizer // 4] == found[0]


class Buffers(Callback):
    """Numbers in Megatron-FSDP's buffers on this rank: weights, master weights, gradients."""

    def on_train_step_end(self, context):
        groups = context.model[0].param_and_grad_buffer.parameter_groups
        kinds = ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer")
        self.found = [sum(getattr(group, kind).data.numel() for group in groups) for kind in kinds]


def hold_buffers(arguments):
    held, buffers = Held(), Buffers()
    run_to(None, 1, {**arguments, "extra": [held, buffers]})
    return held.found, buffers.found


@pytest.mark.parametrize(
    "cut", [MEGATRON, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (STATE, GRADIENTS))]
)
def test_each_rank_holds_an_equal_part_of_megatrons_buffers(two_workers, run_in_process, cut):
    found = two_workers.run(hold_buffers, {**cut, **BF16})
    config = toy_config(
        mixed_precision="bf16_mixed", ddp=DistributedDataParallelConfig(**cut["ddp"])
    )
    config = config.resolve(2).config
    memory = memory_per_rank(config, 2)[0]
    share = memory.optimizer // 12  # master weights and two moments in fp32
    padded = 2 * share
    assert padded < 1.01 * memory.parameters
    strategy = config.ddp.data_parallel_sharding_strategy
    weights = share if strategy == "optim_grads_params" else padded
    gradients = padded if strategy == "optim" else share
    assert [buffers for _, buffers in found] == [[weights, share, gradients]] * 2
    for kind, count in enumerate(
        (1, 1, 2)
    ):  # rows of master weights, of their gradients, of both moments
        assert sum(held[kind] for held, _ in found) == count * memory.parameters
    beside = (
        memory.parameters if strategy == "optim_grads_params" else 0
    )  # a toy is gathered as a whole
    assert memory.weights // 2 == pytest.approx(weights + beside, rel=0.01)
    assert memory.gradients // 4 == pytest.approx(
        gradients + (0 if strategy == "optim" else padded), rel=0.01
    )


@pytest.mark.parametrize(
    "model",
    [{**EXPERTS, **EP2}, {**EXPERTS, **EP2, **PP2}, pytest.param(MAMBA, marks=pytest.mark.slow)],
    ids=["experts", "stages", "mamba"],
)
def test_what_stages_and_ranks_of_experts_hold_is_counted(four_workers, model):
    found = four_workers.run(hold_buffers, {**MEGATRON, **BF16, **MICRO, "model": model})
    ddp = DistributedDataParallelConfig(**MEGATRON["ddp"])
    config = toy_config(mixed_precision="bf16_mixed", ddp=ddp, model=model).resolve(4).config
    memories = memory_per_rank(config, 4)
    for rank, (_, (weights, masters, gradients)) in enumerate(found):
        memory = memories[rank * len(memories) // 4]
        assert weights == masters == gradients == memory.optimizer // 12


RESUMED = {
    "bf16": (4, {**FSDP2, **BF16, "model": {**UNEVEN, "num_layers": 2}}),
    "fp32": (2, FSDP2),
    "tp2": (4, {**FSDP2, "model": TP2}),
    "sgd": (2, {**FSDP2, "optimizer": OptimizerConfig(optimizer="sgd", lr=1e-2)}),
    "latent attention": (2, {**FSDP2, "model": LATENT}),
    "tied": (2, {**FSDP2, "model": {"share_embeddings_and_output_weights": True}}),
    "experts": (4, {**FSDP2, **BF16, "model": {**EXPERTS, **EP2}}),
    "further tokens": (2, {**FSDP2, "model": {"mtp_num_layers": 1}}),
    "frozen": (2, {**FSDP2, **BF16, "train": {"frozen": ["*.layers.0.*"]}}),
    "virtual stages": (4, {**FSDP2, **BF16, "model": PP2_VP2}),
    "tied, stages": (
        4,
        {**FSDP2, "model": {**PP2, "share_embeddings_and_output_weights": True}},
    ),
    "delta nets": (2, {**FSDP2, **BF16, "model": DELTA_NETS}),
    "mamba": (2, {**FSDP2, **BF16, "model": MAMBA}),
    "Megatron's, virtual stages": (4, {**MEGATRON, **BF16, "model": PP2_VP2}),
    "Megatron's, expert ranks": (4, {**MEGATRON, **BF16, "model": {**EXPERTS, **EP2}}),
    "Megatron's, delta nets": (2, {**MEGATRON, **BF16, "model": DELTA_NETS}),
    "Megatron's, mamba": (2, {**MEGATRON, **BF16, "model": MAMBA}),
    "Megatron's, experts": (2, {**MEGATRON, **BF16, "model": EXPERTS}),
    "Megatron's, further tokens": (2, {**MEGATRON, "model": {"mtp_num_layers": 1}}),
    "Megatron's, frozen": (2, {**MEGATRON, **BF16, "train": {"frozen": ["*.layers.0.*"]}}),
    "Megatron's, bf16": (4, {**MEGATRON, **BF16, "model": {**GAPS, "num_layers": 2}}),
    "Megatron's, fp32": (2, MEGATRON),
    "Megatron's, tp2": (4, {**MEGATRON, **BF16, "model": {**TP2, "sequence_parallel": True}}),
    "Megatron's, state": (2, {**STATE, **BF16}),
    "Megatron's, state and gradients": (4, {**GRADIENTS, **BF16, "model": GAPS}),
    "Megatron's, in the background": (2, {**MEGATRON, **BF16, "checkpoint": {"async_save": True}}),
    "Megatron's, latent attention": (2, {**MEGATRON, "model": LATENT}),
    "Megatron's, tied": (2, {**MEGATRON, "model": {"share_embeddings_and_output_weights": True}}),
}
RESUMED_IN_CI = ("bf16", "mamba", "Megatron's, bf16", "Megatron's, expert ranks")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in RESUMED_IN_CI))
        for name in RESUMED
    ],
)
def test_a_resumed_run_is_the_undisturbed_one(request, tmp_path, name):
    size, arguments = RESUMED[name]
    pool = request.getfixturevalue({2: "two_workers", 4: "four_workers"}[size])
    exact = {
        **arguments,
        "train": {**MICRO["train"], **arguments.get("train", {})},
        "model": {**arguments.get("model", {}), **DROPOUT},
    }
    saving = {**arguments.get("checkpoint", {}), "save_interval": 3}
    undisturbed = pool.run(run_to, tmp_path, STEPS, {**exact, "checkpoint": saving})
    paths.write_tracker(tmp_path, 3)
    resumed = pool.run(run_to, tmp_path, STEPS, exact)
    for rank in range(size):
        for part in undisturbed[rank]:
            assert resumed[rank][part] == undisturbed[rank][part], (rank, part)


@pytest.mark.parametrize(
    ("cut", "model", "precision"),
    [
        (FSDP2, UNEVEN, "bf16_mixed"),
        pytest.param(FSDP2, UNEVEN, "fp32", marks=pytest.mark.slow),
        ({**FSDP2, "model": {**EXPERTS, **EP2}}, EXPERTS, "fp32"),
        (MEGATRON, EXPERTS, "fp32"),
        ({**MEGATRON, "model": {**EXPERTS, **EP2}}, EXPERTS, "fp32"),
        pytest.param(
            {**MEGATRON, "model": {**EXPERTS, **EP2, **PP2}},
            EXPERTS,
            "fp32",
            marks=pytest.mark.slow,
        ),
        pytest.param({**FSDP2, "model": PP2_VP2}, {}, "fp32", marks=pytest.mark.slow),
        pytest.param({**MEGATRON, "model": MAMBA}, MAMBA, "fp32", marks=pytest.mark.slow),
        pytest.param({**FSDP2, "model": DELTA_NETS}, DELTA_NETS, "fp32", marks=pytest.mark.slow),
        (MEGATRON, GAPS, "bf16_mixed"),
        pytest.param(MEGATRON, GAPS, "fp32", marks=pytest.mark.slow),
        pytest.param(STATE, GAPS, "bf16_mixed", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_that_of_one_process(
    four_workers, run_in_process, tmp_path, cut, model, precision
):
    """Whatever is read from it: the whole tensors are equal, the optimizer's, too."""
    arguments = {
        **MICRO,
        "model": model,
        "mixed_precision": precision,
        "checkpoint": {"save_interval": 2},
    }
    four_workers.run(run_to, tmp_path / "sharded", 2, {**arguments, **cut})
    run_to(tmp_path / "whole", 2, arguments)
    found, expected = (tensors_of(paths.resolve(tmp_path / name)) for name in ("sharded", "whole"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert (found[key] - value).abs().max() <= 1e-6, key


# The norm of all gradients is added up in another order, so that clipping would round a weight to another bf16.
UNCLIPPED = {**BF16, "optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)}
OTHERS = {
    "tp2": (FSDP2, {"model": TP2}),
    "dp2": (FSDP2, {}),
    "bf16 dp2": ({**FSDP2, **UNCLIPPED}, UNCLIPPED),
    "experts": (
        {**FSDP2, "model": {**EXPERTS, **EP2}},
        {"model": {**EXPERTS, **TP2, "sequence_parallel": True}},
    ),
    "Megatron's, tp2": (MEGATRON, {"model": TP2}),
    "Megatron's, FSDP2": (MEGATRON, FSDP2),
    "Megatron's, bf16 dp2": ({**MEGATRON, **UNCLIPPED}, UNCLIPPED),
    "Megatron's, bf16, its state alone": ({**MEGATRON, **UNCLIPPED}, {**STATE, **UNCLIPPED}),
}
OTHERS_IN_CI = ("tp2", "Megatron's, FSDP2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OTHERS_IN_CI)) for name in OTHERS],
)
def test_a_run_goes_on_under_another_layout_and_comes_back(two_workers, tmp_path, name):
    """Two steps each: sharded, otherwise, sharded again."""
    sharded, other = OTHERS[name]
    undisturbed = two_workers.run(run_to, None, STEPS, sharded)
    for stop, arguments in ((2, sharded), (4, other), (6, sharded)):
        found = two_workers.run(
            run_to, tmp_path, stop, {**arguments, "checkpoint": {"save_interval": 2}}
        )
    assert len(found[0]["losses"]) == STEPS
    for step, loss in undisturbed[0]["losses"].items():
        assert found[0]["losses"][step] == pytest.approx(loss, rel=1e-6)


def there_and_back(source, target, options):
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider(load_weights=False)
    chunks = provider.provide_distributed_model(**options)
    bridge.load_hf_weights(chunks)
    with torch.no_grad():  # gathers what it computes with, and gives it back
        tokens = torch.arange(8)[None]
        logits = chunks[0](input_ids=tokens, position_ids=tokens, attention_mask=None)
    bridge.save_hf_pretrained(chunks, target, show_progress=False)
    streamed = {
        name: weight.clone()
        for name, weight in bridge.export_hf_weights(chunks, show_progress=False)
    }
    parallel_state.destroy_model_parallel()
    return streamed, logits.clone()


HOW = {
    "FSDP2": {"use_torch_fsdp2": True},
    "Megatron-FSDP": {"ddp_config": DistributedDataParallelConfig(**MEGATRON["ddp"])},
    "Megatron-FSDP of state": {"ddp_config": DistributedDataParallelConfig(**STATE["ddp"])},
}


@pytest.mark.parametrize("name", HOW)
def test_a_sharded_model_takes_and_gives_hugging_face_weights(two_workers, tmp_path, name):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    make_llama(source, shard_size="5GB")
    streams = two_workers.run(there_and_back, source, tmp_path / "target", HOW[name])
    assert filecmp.cmp(
        source / "model.safetensors", tmp_path / "target" / "model.safetensors", shallow=False
    )
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(torch.arange(8)[None]).logits
    for stream, logits in streams:
        stored = load_file(source / "model.safetensors")
        assert stream.keys() == stored.keys()
        assert all(torch.equal(stream[name], stored[name]) for name in stored)
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max())
        )


def log_norm(folder, cut):
    logger = LoggerConfig(log_interval=1, log_dir=str(folder), log_params_norm=True)
    return run_toy(
        {**cut, "train": {"train_iters": 2}, "logger": logger, "validation": ValidationConfig()}
    )


@pytest.mark.parametrize("cut", [FSDP2, {"ddp": DistributedDataParallelConfig(**MEGATRON["ddp"])}])
def test_the_norm_of_all_weights_counts_each_once(two_workers, tmp_path, cut):
    records = two_workers.run(log_norm, tmp_path, cut)
    expected = (
        sum(weight.double().square().sum() for weight in whole_weights(records).values())
        .sqrt()
        .item()
    )
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["params norm"] == pytest.approx(expected, rel=1e-6)


class Spoiled(Callback):
    """A gradient that is wrong once, on the last rank."""

    def __init__(self):
        self.left = 1

    def on_grads_ready(self, context):
        if self.left and parallel_state.get_data_parallel_rank():
            self.left = 0
            gradients = (parameter.grad for parameter in context.model[0].parameters())
            local_rows(next(gradient for gradient in gradients if gradient is not None)).view(-1)[
                0
            ] = float("nan")


def spoil(arguments, callbacks):
    with console().capture() as capture:
        result = run_to(
            None,
            2,
            {**arguments, "rerun_state_machine": RerunStateMachineConfig(), "extra": callbacks},
        )
    return result["losses"], capture.get()


@pytest.mark.parametrize("cut", [pytest.param(FSDP2, marks=pytest.mark.slow), MEGATRON])
def test_a_wrong_gradient_is_found_and_its_step_repeated(two_workers, cut):
    undisturbed = two_workers.run(run_to, None, 2, cut)
    found = two_workers.run(spoil, cut, [Spoiled()])
    assert "step 1: the gradient norm is nan on rank 1" in found[0][1]
    assert "a transient error" in found[0][1]
    assert [losses for losses, _ in found] == [result["losses"] for result in undisturbed]


def random_states_of_parts():
    """Before and after wrapping, of the generator from which a tensor-parallel rank draws for its part."""
    states = []

    def note(chunks):
        states.append(get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone())

    provider = toy_config(model=TP2).model
    provider.initialize_model_parallel(seed=1)
    provider.register_post_wrap_hook(note)
    provider.provide_distributed_model(**HOW["Megatron-FSDP"], pre_wrap_hook=note)
    parallel_state.destroy_model_parallel()
    return [state.tolist() for state in states]


def test_tensor_parallel_ranks_go_on_drawing_for_their_own_parts(two_workers):
    (first, first_after), (second, second_after) = two_workers.run(random_states_of_parts)
    assert first == first_after
    assert second == second_after
    assert first != second
