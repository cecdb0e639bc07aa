# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge checkpoint`` on folders of small tensors."""

import shutil

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.bridge.checkpoint import lock, model_io, paths, saving
from megatron.bridge.cli.main import main
from megatron.bridge.utils import distributed
from tests.workers import leave


@pytest.fixture(scope="module", autouse=True)
def process_group():
    own = not distributed.is_initialized()
    distributed.initialize("gloo")
    yield
    if own:
        leave()


def _save(root, iteration, **tensors):
    state = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in tensors.items()}
    extra = model_io.extra_files({"model": {"_target_": "toy.Model"}})
    saving.save(state, paths.iteration_dir(root, iteration), extra)
    paths.write_tracker(root, iteration)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    optimizer = {"optimizer.state.exp_avg.a": torch.zeros(4, 3)}
    _save(root, 10, a=torch.zeros(4, 3), b=torch.ones(2), **optimizer)
    _save(
        root, 20, a=torch.tensor([[0.0] * 3] * 3 + [[0.0, 0.0, 0.5]]), c=torch.ones(2), **optimizer
    )
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def _lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_list(root, capsys):
    (root / "iter_0000030.1a2b3c4d.incomplete").mkdir()
    (root / "iter_0000010" / ".metadata").write_bytes(b"")
    with lock.held(root):
        assert main(["checkpoint", "list", str(root)]) == 0
    older, newer, left, holder = _lines(capsys)
    assert older.startswith("iter_0000010")
    assert older.endswith("damaged")
    assert newer.endswith("complete  newest")
    assert (
        left
        == "iter_0000030.1a2b3c4d.incomplete  left by an interrupted save; the next run removes it"
    )
    assert holder.startswith("being written by process")


def test_list_without_anything(tmp_path, capsys):
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert _lines(capsys) == ["no checkpoints"]
    assert main(["checkpoint", "list", str(tmp_path / "typo")]) == 1


def test_inspect(root, capsys):
    assert main(["checkpoint", "inspect", str(root), "--tensors", "exp"]) == 0
    first, weights, optimizer, tensor = _lines(capsys)
    assert first.startswith(f"{root / 'iter_0000020'}: ")
    assert first.endswith("complete")
    assert weights == "weights: 2 tensors, 14 values, 56 B"
    assert optimizer == "optimizer: 1 tensor, 12 values, 48 B"
    assert tensor == "optimizer.state.exp_avg.a  4x3 float32"


def test_verify(root, capsys):
    assert main(["checkpoint", "verify", str(root), "--all"]) == 0
    assert [line.rpartition(": ")[2] for line in _lines(capsys)] == ["as it was saved"] * 2
    shard = root / "iter_0000010" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    assert main(["checkpoint", "verify", str(root)]) == 0, "the newest one is whole"
    assert main(["checkpoint", "verify", str(root), "--all"]) == 1
    assert "the content of __0_0.distcp is not what was written" in capsys.readouterr().out


def test_diff(root, capsys):
    first, second = str(root / "iter_0000010"), str(root / "iter_0000020")
    assert main(["checkpoint", "diff", first, first, "--values"]) == 0
    assert _lines(capsys) == ["no difference in names, shapes, dtypes and values"]
    assert main(["checkpoint", "diff", first, second, "--values"]) == 1
    assert _lines(capsys) == [
        f"only in {first}: b",
        f"only in {second}: c",
        "a: 1 of 12 values differ, by at most 0.5",
    ]


def test_convert_takes_the_weights_and_unstacks_layers(tmp_path, capsys):
    stacked = torch.arange(12.0).view(3, 4)
    _save(
        tmp_path / "megatron_lm",
        5,
        **{
            "decoder.layers.mlp.linear_fc1.weight": stacked,
            "decoder.final_layernorm.weight": torch.ones(4),
            "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(4),
        },
    )
    target = tmp_path / "converted"
    assert main(["checkpoint", "convert", str(tmp_path / "megatron_lm"), str(target)]) == 0
    assert _lines(capsys) == [str(target / "iter_0000000")]
    assert main(["checkpoint", "inspect", str(target), "--tensors", ""]) == 0
    assert [line.partition(" ")[0] for line in _lines(capsys)[3:]] == [
        "decoder.final_layernorm.weight",
        *(f"decoder.layers.{index}.mlp.linear_fc1.weight" for index in range(3)),
    ]
    assert main(["checkpoint", "verify", str(target)]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "megatron_lm"), str(target)]) == 1, (
        "it is there already"
    )
