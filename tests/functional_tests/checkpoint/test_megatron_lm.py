# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as Megatron-LM lays it out: layers stacked, arguments, optimizer and random states beside them."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from safetensors.torch import load_file

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import inspection, model_io, paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.checkpoint import toy
from tests.functional_tests.checkpoint.runs import STEPS, run_to
from tests.toy_models import make_llama


def _save_like_megatron_lm(root):
    """What ``megatron.training`` puts together for ``torch_dist``, by hand."""
    (chunk,) = toy.build(tp=2)
    model = chunk.sharded_state_dict()
    weight = chunk.decoder.final_layernorm.weight
    moment = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_layernorm.weight",
        torch.zeros_like(weight),
        replica_id=distributed.rank(),
    )
    state = {
        "args": Namespace(num_layers=4, hidden_size=32),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model,
        "optimizer": {"exp_avg": moment, "param_groups": [{"lr": 1e-3}]},
        "opt_param_scheduler": {"num_steps": 56},
        "rng_state": ShardedObject("rng_state", {"seed": 1}, (1, 2), (0, distributed.rank())),
    }
    directory = Path(root) / "iter_0000007"
    if distributed.rank() == 0:
        directory.mkdir(parents=True)
        (Path(root) / paths.TRACKER).write_text("7")
    distributed.barrier()
    dist_checkpointing.save(state, str(directory), async_strategy="mcore")
    return {
        name: value.detach().clone()
        for name, value in chunk.state_dict().items()
        if value is not None
    }


def _load(path, options):
    chunks = toy.build(**{"seed": 2, **options})
    model_io.load_model(chunks, path)
    return [
        {
            name: value.detach().clone()
            for name, value in chunk.state_dict().items()
            if value is not None
        }
        for chunk in chunks
    ]


@pytest.fixture(scope="module")
def megatron_lm(two_workers, tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron_lm")
    return root, two_workers.run(_save_like_megatron_lm, root)


def _same(found, expected):
    assert len(expected) > 20
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_its_weights_are_loaded_as_they_are(two_workers, megatron_lm):
    root, expected = megatron_lm
    for (found,), wanted in zip(two_workers.run(_load, root, {"tp": 2}), expected, strict=True):
        assert _same(found, wanted)
    stages = two_workers.run(_load, root, {"pp": 2})  # another layout reads the same layers
    norm = "decoder.final_layernorm.weight"
    assert torch.equal(stages[1][0][norm], expected[0][norm])


def test_converted_it_is_a_checkpoint_of_ours(two_workers, megatron_lm, tmp_path):
    root, expected = megatron_lm
    directory = two_workers.run(_convert_on_first, root, tmp_path / "run")[0]
    names = inspection.list_tensors(directory)
    assert "decoder.layers.3.mlp.linear_fc1.weight" in names
    assert not any(name.startswith("optimizer") for name in names)
    for (found,), wanted in zip(
        two_workers.run(_load, tmp_path / "run", {"tp": 2}), expected, strict=True
    ):
        assert _same(found, wanted)


def _convert_on_first(root, target):
    import subprocess
    import sys

    if distributed.rank() == 0:  # the command line runs in a process of its own
        command = [
            sys.executable,
            "-m",
            "megatron.bridge.cli.main",
            "checkpoint",
            "convert",
            str(root),
            str(target),
        ]
        environment = {"PATH": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    distributed.barrier()
    return target / "iter_0000000"


def _export_without_run_config(root):
    """A checkpoint of a Llama with a padded vocabulary, as Megatron-LM saves it, back to Hugging Face."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    bridge = AutoBridge.from_hf_pretrained(root / "hf")
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = 2
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 64
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    directory = root / "lm" / "iter_0000007"
    if distributed.rank() == 0:
        directory.mkdir(parents=True)
        (root / "lm" / paths.TRACKER).write_text("7")
    distributed.barrier()
    state = {
        "args": Namespace(),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "opt_param_scheduler": {},
    }
    model = model_io.unwrap(chunk).sharded_state_dict()
    dist_checkpointing.save({**state, "model": model}, str(directory), async_strategy="mcore")
    bridge.export_ckpt(root / "lm", root / "out", show_progress=False)
    return inspection.list_tensors(directory)["embedding.word_embeddings.weight"].shape[0]


def _tensors(folder):
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def test_it_is_exported_with_a_model_that_says_what_it_is(two_workers, tmp_path):
    """It has no run_config.yaml; the rows of padding are left out."""
    make_llama(tmp_path / "hf")
    assert two_workers.run(_export_without_run_config, tmp_path) == [128, 128]
    given, found = (_tensors(tmp_path / folder) for folder in ("hf", "out"))
    assert given.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "scratch" not in card


def _save_like_nemo(root):
    """A folder of NeMo 2: names with a prefix, states of optimizer and layers, and a description beside them."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    provider = AutoBridge.from_hf_pretrained(root / "hf").to_megatron_provider()
    provider.tensor_model_parallel_size = 2
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    state = model_io.unwrap(chunk).sharded_state_dict(prefix="module.")
    weights = root / "nemo" / "weights"
    if distributed.rank() == 0:
        weights.mkdir(parents=True)
        (root / "nemo" / "context").mkdir()
        (root / "nemo" / "context" / "io.json").write_text(
            '{"objects": {}, "refs": {}, "root": "model"}'
        )
    distributed.barrier()
    norm = "module.decoder.final_layernorm"
    moment = torch.zeros(provider.hidden_size)
    others = {
        "moment": ShardedTensor.from_rank_offsets(
            f"optimizer.state.exp_avg.{norm}.weight", moment, replica_id=distributed.rank()
        ),
        "extra": ShardedObject(
            f"{norm}._extra_state", None, (1,), (0,), replica_id=distributed.rank()
        ),
    }
    dist_checkpointing.save(
        {**others, "sharded_state_dict": state}, str(weights), async_strategy="mcore"
    )
    if distributed.rank() == 0:  # as the Megatron-Core of that time wrote them
        common = {
            "epoch": 0,
            "global_step": 7,
            "loops": {},
            "optimizer": {"param_groups": [{"lr": 1e-3}]},
        }
        torch.save(common, weights / "common.pt")
        versions = {
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (weights / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", **versions})
        )


def _load_nemo(root):
    """The weights in the other layout, against those of the Hugging Face folder."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    bridge = AutoBridge.from_hf_pretrained(root / "hf")
    provider = bridge.to_megatron_provider()
    provider.pipeline_model_parallel_size = 2
    wanted = provider.provide_distributed_model(wrap_with_ddp=False)
    empty = bridge.to_megatron_provider(load_weights=False)
    empty.pipeline_model_parallel_size = 2
    found = empty.provide_distributed_model(wrap_with_ddp=False)
    model_io.load_model(found, root / "nemo")
    bridge.export_ckpt(root / "nemo", root / "out", show_progress=False)
    pairs = zip(wanted[0].state_dict().items(), found[0].state_dict().items(), strict=True)
    return [
        name
        for (name, value), (_, other) in pairs
        if value is not None and not torch.equal(value, other)
    ]


def test_a_checkpoint_of_nemo_2_is_loaded_and_exported(two_workers, tmp_path):
    make_llama(tmp_path / "hf")
    two_workers.run(_save_like_nemo, tmp_path)
    assert two_workers.run(_load_nemo, tmp_path) == [[], []]
    given, found = (_tensors(tmp_path / folder) for folder in ("hf", "out"))
    assert given.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())
    (tmp_path / "nemo" / "weights" / "metadata.json").unlink()
    with pytest.raises(
        UserError, match=r"nemo/weights is not a checkpoint: metadata\.json is missing"
    ):
        AutoBridge.from_hf_pretrained(tmp_path / "hf").export_ckpt(
            tmp_path / "nemo", tmp_path / "again"
        )


class SavesLikeMegatronLM(Callback):
    """At step 3, what ``megatron.training`` saves, by Megatron-Core's own description of its optimizer."""

    def __init__(self, root, kind):
        self.root, self.kind = root, kind

    def on_train_step_end(self, context):
        if context.progress.step == 3:
            (chunk,) = context.model
            state = {"model": model_io.unwrap(chunk).sharded_state_dict()}
            metadata = {
                "distrib_optim_sharding_type": self.kind,
                "chained_optim_avoid_prefix": True,
            }
            state |= {
                "args": Namespace(global_batch_size=4, consumed_train_samples=12),
                "checkpoint_version": 3.0,
                "iteration": 3,
                "optimizer": context.optimizer.sharded_state_dict(state, metadata=metadata),
                "opt_param_scheduler": context.scheduler.state_dict(),
                "rng_state": ShardedObject("rng_state", {}, (1, 2), (0, distributed.rank())),
            }
            if distributed.rank() == 0:
                self.root.mkdir()
            distributed.barrier()
            dist_checkpointing.save(state, str(self.root), async_strategy="mcore")


def _trained(root, arguments, kind="fully_reshardable"):
    return run_to(None, STEPS, {**arguments, "extra": [SavesLikeMegatronLM(root, kind)]})


def _refused(root, arguments):
    with pytest.raises(UserError) as caught:
        run_to(None, STEPS, arguments, load=str(root))
    return str(caught.value)


SHARDED = {"ddp": {"use_distributed_optimizer": True}}
TP2 = {"model": {"tensor_model_parallel_size": 2}}
BF16 = {"mixed_precision": "bf16_mixed"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({**SHARDED, **BF16}, {**SHARDED, **BF16}),
        pytest.param(SHARDED, TP2, marks=pytest.mark.slow),
        pytest.param({**TP2, **BF16}, {**TP2, **BF16}, marks=pytest.mark.slow),
    ],
    ids=["dp2_bf16", "dp2_to_tp2", "tp2_bf16"],
)
def test_a_run_goes_on_with_its_optimizer(two_workers, tmp_path, before, after):
    root = tmp_path / "iter_0000003"
    undisturbed = two_workers.run(_trained, root, before)[0]
    resumed = two_workers.run(partial(run_to, load=str(root)), None, STEPS, after)[0]
    assert sorted(resumed["losses"]) == [4, 5, 6]
    for step, loss in resumed["losses"].items():
        # the same layout: the same bits; another: what that costs any run
        assert abs(loss - undisturbed["losses"][step]) <= (0 if before == after else 1e-6)
    assert (
        resumed["progress"]["consumed_train_samples"]
        == undisturbed["progress"]["consumed_train_samples"]
    )
    assert resumed["schedule"] == undisturbed["schedule"]
    if before == after:
        assert resumed["digest"]["optimizer"] == undisturbed["digest"]["optimizer"]


def test_buffers_of_another_layout_are_refused(two_workers, tmp_path):
    root = tmp_path / "iter_0000003"
    two_workers.run(_trained, root, SHARDED, "dp_reshardable")
    message = two_workers.run(_refused, root, SHARDED)[0]
    assert "optimizer.distributed" in message
    assert "--dist-ckpt-optim-fully-reshardable" in message
    weights = {**SHARDED, "checkpoint": {"load_optim": False, "load_rng": False}}
    resumed = two_workers.run(partial(run_to, load=str(root)), None, STEPS, weights)[0]
    assert sorted(resumed["losses"]) == [4, 5, 6]
