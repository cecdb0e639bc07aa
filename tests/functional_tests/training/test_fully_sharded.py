# SPDX-License-Identifier: Apache-2.0
"""PyTorch's fully sharded data parallelism: what ranks hold, and that its checkpoints are those of any layout.

That it learns what one process learns is in ``tests/parity.py``.
"""

import filecmp
import json

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.backends.fully_sharded import local
from megatron.bridge.checkpoint import layout
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import DistributedInitConfig, LoggerConfig, OptimizerConfig, ValidationConfig
from megatron.bridge.training.optimizer import torch_optimizers
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to, tensors_of
from tests.parity import LATENT
from tests.toy_models import make_llama
from tests.toy_run import run_toy, toy_config, whole_weights

FSDP2 = {"dist": DistributedInitConfig(use_torch_fsdp2=True)}
TP2 = {"tensor_model_parallel_size": 2}
MICRO = {"train": {"micro_batch_size": 1}}
BF16 = {"mixed_precision": "bf16_mixed"}
# On four ranks two hold nothing of the norms of heads, and one the end of a gate and the start of an up matrix.
UNEVEN = {"ffn_hidden_size": 63, "kv_channels": 2, "qk_layernorm": True}


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
        gradients = [weight.grad for weight in weights]
        self.found = [sum(local(tensor).numel() for tensor in kind) for kind in (weights, gradients, state)]


def hold(arguments):
    held = Held()
    run_to(None, 1, {**arguments, "extra": [held]})
    return held.found


@pytest.mark.parametrize("precision", ["bf16_mixed", pytest.param("fp32", marks=pytest.mark.slow)])
def test_each_rank_holds_its_share_of_everything(two_workers, run_in_process, precision):
    found = two_workers.run(hold, {**FSDP2, "mixed_precision": precision})
    alone = sum(weight.numel() for weight in whole_weights([run_toy({"train": {"train_iters": 1}})]).values())
    assert found == [[alone // 2, alone // 2, alone]] * 2
    config = toy_config(mixed_precision=precision, **FSDP2)
    config.validate(2)
    memory = memory_per_rank(config, 2)[0]  # what a dry run says, in bytes of fp32
    assert [memory.parameters // 2, memory.gradients // 4, memory.optimizer // 4] == found[0]


RESUMED = {
    "bf16": (4, {**BF16, "model": {**UNEVEN, "num_layers": 2}}),
    "fp32": (2, {}),
    "tp2": (4, {"model": TP2}),
    "sgd": (2, {"optimizer": OptimizerConfig(optimizer="sgd", lr=1e-2)}),
    "latent attention": (2, {"model": LATENT}),
    "tied": (2, {"model": {"share_embeddings_and_output_weights": True}}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "bf16")) for name in RESUMED]
)
def test_a_resumed_run_is_the_undisturbed_one(request, tmp_path, name):
    size, arguments = RESUMED[name]
    pool = request.getfixturevalue({2: "two_workers", 4: "four_workers"}[size])
    exact = {**MICRO, **FSDP2, **arguments, "model": {**arguments.get("model", {}), **DROPOUT}}
    undisturbed = pool.run(run_to, tmp_path, STEPS, {**exact, "checkpoint": {"save_interval": 3}})
    layout.write_tracker(tmp_path, 3)
    resumed = pool.run(run_to, tmp_path, STEPS, exact)
    for rank in range(size):
        for part in undisturbed[rank]:
            assert resumed[rank][part] == undisturbed[rank][part], (rank, part)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16_mixed"])
def test_a_checkpoint_is_that_of_one_process(four_workers, run_in_process, tmp_path, precision):
    """Whatever is read from it: the whole tensors are equal, the optimizer's, too."""
    arguments = {**MICRO, "model": UNEVEN, "mixed_precision": precision, "checkpoint": {"save_interval": 2}}
    four_workers.run(run_to, tmp_path / "sharded", 2, {**arguments, **FSDP2})
    run_to(tmp_path / "whole", 2, arguments)
    found, expected = (tensors_of(layout.resolve(tmp_path / name)) for name in ("sharded", "whole"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert (found[key] - value).abs().max() <= 1e-6, key


OTHERS = {
    "tp2": ({}, {"model": TP2}),
    "dp2": ({}, {}),
    "bf16 dp2": (BF16, BF16),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tp2")) for name in OTHERS]
)
def test_a_run_goes_on_under_another_layout_and_comes_back(two_workers, tmp_path, name):
    """Two steps each: sharded, otherwise, sharded again."""
    sharded, other = OTHERS[name]
    undisturbed = two_workers.run(run_to, None, STEPS, {**sharded, **FSDP2})
    for stop, arguments in ((2, {**sharded, **FSDP2}), (4, other), (6, {**sharded, **FSDP2})):
        found = two_workers.run(run_to, tmp_path, stop, {**arguments, "checkpoint": {"save_interval": 2}})
    assert len(found[0]["losses"]) == STEPS
    for step, loss in undisturbed[0]["losses"].items():
        assert found[0]["losses"][step] == pytest.approx(loss, rel=1e-6)


def there_and_back(source, target):
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider(load_weights=False)
    chunks = provider.provide_distributed_model(use_torch_fsdp2=True)
    bridge.load_hf_weights(chunks)
    bridge.save_hf_pretrained(chunks, target, show_progress=False)
    streamed = {name: weight.clone() for name, weight in bridge.export_hf_weights(chunks, show_progress=False)}
    parallel_state.destroy_model_parallel()
    return streamed


def test_a_sharded_model_takes_and_gives_hugging_face_weights(two_workers, tmp_path):
    from safetensors.torch import load_file

    source = tmp_path / "source"
    make_llama(source, shard_size="5GB")
    streams = two_workers.run(there_and_back, source, tmp_path / "target")
    assert filecmp.cmp(source / "model.safetensors", tmp_path / "target" / "model.safetensors", shallow=False)
    for stream in streams:
        stored = load_file(source / "model.safetensors")
        assert stream.keys() == stored.keys()
        assert all(torch.equal(stream[name], stored[name]) for name in stored)


def log_norm(folder):
    logger = LoggerConfig(log_interval=1, log_dir=str(folder), log_params_norm=True)
    return run_toy({**FSDP2, "train": {"train_iters": 2}, "logger": logger, "validation": ValidationConfig()})


def test_the_norm_of_all_weights_counts_each_once(two_workers, tmp_path):
    records = two_workers.run(log_norm, tmp_path)
    expected = sum(weight.double().square().sum() for weight in whole_weights(records).values()).sqrt().item()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["params norm"] == pytest.approx(expected, rel=1e-6)
