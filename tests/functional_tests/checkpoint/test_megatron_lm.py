# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as Megatron-LM lays it out: layers stacked, arguments, optimizer and random states beside them."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron.bridge.checkpoint import contents, layout, model_io
from megatron.bridge.utils import dist
from tests.functional_tests.checkpoint import toy


def _save_like_megatron_lm(root):
    """What ``megatron.training`` puts together for ``torch_dist``, by hand."""
    (chunk,) = toy.build(tp=2)
    model = chunk.sharded_state_dict()
    weight = chunk.decoder.final_layernorm.weight
    moment = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.zeros_like(weight), replica_id=dist.rank()
    )
    state = {
        "args": Namespace(num_layers=4, hidden_size=32),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model,
        "optimizer": {"exp_avg": moment, "param_groups": [{"lr": 1e-3}]},
        "opt_param_scheduler": {"num_steps": 56},
        "rng_state": ShardedObject("rng_state", {"seed": 1}, (1, 2), (0, dist.rank())),
    }
    directory = Path(root) / "iter_0000007"
    if dist.rank() == 0:
        directory.mkdir(parents=True)
        (Path(root) / layout.TRACKER).write_text("7")
    dist.barrier()
    dist_checkpointing.save(state, str(directory), async_strategy="mcore")
    return {name: value.detach().clone() for name, value in chunk.state_dict().items() if value is not None}


def _load(path, options):
    chunks = toy.build(**{"seed": 2, **options})
    model_io.load_model(chunks, path)
    return [
        {name: value.detach().clone() for name, value in chunk.state_dict().items() if value is not None}
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
    names = contents.tensors(directory)
    assert "decoder.layers.3.mlp.linear_fc1.weight" in names
    assert not any(name.startswith("optimizer") for name in names)
    for (found,), wanted in zip(two_workers.run(_load, tmp_path / "run", {"tp": 2}), expected, strict=True):
        assert _same(found, wanted)


def _convert_on_first(root, target):
    import subprocess
    import sys

    if dist.rank() == 0:  # the command line runs in a process of its own
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
        subprocess.run(command, check=True, env=environment, capture_output=True)
    dist.barrier()
    return target / "iter_0000000"
