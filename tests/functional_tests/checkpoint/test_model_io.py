# SPDX-License-Identifier: Apache-2.0
"""Weights saved under one layout are the same weights under another; what is damaged or foreign is refused."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron.bridge.checkpoint import loading, model_io, paths
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.checkpoint import toy
from tests.functional_tests.checkpoint.runs import tensors_of

CONFIG = {"model": {"_target_": "toy.Model", "num_layers": 4}}


def _save(root, options):
    return model_io.save_model(toy.build(**options), root, CONFIG)


def _convert(source, target, options):
    chunks = toy.build(**{"seed": 2, **options})
    model_io.load_model(chunks, source)
    return model_io.save_model(chunks, target, CONFIG)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_survive_every_layout(two_workers, tmp_path, tied):
    layouts = [{"tp": 2}, {"pp": 2}, {"pp": 2, "vp": 2}]
    source = two_workers.run(_save, tmp_path / "start", {"tied": tied})[0]
    expected = tensors_of(source)
    assert len(expected) > 10
    for index, options in enumerate(layouts):
        source = two_workers.run(
            _convert, source, tmp_path / str(index), {"tied": tied, **options}
        )[0]
        found = tensors_of(source)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (options, name)


def test_megatron_reads_what_we_write(two_workers, tmp_path):
    path = two_workers.run(_save, tmp_path / "run", {"tp": 2})[0]
    assert two_workers.run(_read_with_megatron, path) == [True, True]
    assert paths.latest_iteration(tmp_path / "run") == 0
    assert model_io.read_run_config(tmp_path / "run") == CONFIG
    _cut(path / paths.RUN_CONFIG, 6)  # still valid YAML, of another model
    with pytest.raises(UserError, match=r"damaged: run_config.yaml does not end"):
        model_io.read_run_config(path)


def _read_with_megatron(path):
    (chunk,) = toy.build(tp=1, seed=3)
    state = chunk.sharded_state_dict(metadata=dict(model_io.MODEL_METADATA))
    loaded = dist_checkpointing.load(state, str(path), strict="raise_all")
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    return torch.equal(loaded[name], tensors_of(path)[name])


def _refusal(function, *args):
    with pytest.raises(UserError) as caught:
        function(*args)
    return str(caught.value)


def _load_with(path, options):
    return _refusal(model_io.load_model, toy.build(**{"seed": 2, **options}), path)


def test_damage_is_named_on_all_ranks(two_workers, tmp_path):
    good = two_workers.run(_save, tmp_path / "run", {})[0]
    shard = max(good.glob("*.distcp"), key=lambda path: path.stat().st_size)

    def damaged(name, damage):
        copy = tmp_path / name / good.name
        shutil.copytree(good, copy)
        damage(copy)
        messages = two_workers.run(_load_with, copy, {})
        assert messages[0] == messages[1]
        return messages[0]

    assert shard.name in damaged("truncated", lambda copy: _cut(copy / shard.name, 1000))
    assert f"{shard.name} is missing" in damaged(
        "deleted", lambda copy: (copy / shard.name).unlink()
    )
    assert ".metadata" in damaged("metadata", lambda copy: _cut(copy / ".metadata", 1000))
    assert "metadata.json is missing" in damaged(
        "json", lambda copy: (copy / "metadata.json").unlink()
    )
    zeros = bytes(shard.stat().st_size)
    changed = f"the content of {shard.name} is not what was written"
    assert changed in damaged("zeros", lambda copy: (copy / shard.name).write_bytes(zeros))


def _cut(path, size):
    os.truncate(path, path.stat().st_size - size)


def test_another_model_is_refused(two_workers, tmp_path):
    path = two_workers.run(_save, tmp_path / "run", {})[0]
    narrow = two_workers.run(_load_with, path, {"hidden_size": 16})[0]
    assert "shapes differ: decoder.final_layernorm.bias is 32, the model's is 16" in narrow
    assert "it lacks" in two_workers.run(_load_with, path, {"num_layers": 5})[0]
    assert "it also holds" in two_workers.run(_load_with, path, {"num_layers": 3})[0]


def test_an_existing_iteration_is_not_replaced(two_workers, tmp_path):
    two_workers.run(_save, tmp_path / "run", {})
    before = tensors_of(tmp_path / "run" / "iter_0000000")
    messages = two_workers.run(_save_refused, tmp_path / "run")
    assert all("exists" in message for message in messages)
    assert all(
        torch.equal(value, before[name])
        for name, value in tensors_of(paths.resolve(tmp_path / "run")).items()
    )


def _save_refused(root):
    return _refusal(model_io.save_model, toy.build(seed=5), root, CONFIG)


def test_a_full_disk_leaves_nothing_behind(two_workers, tmp_path):
    messages = two_workers.run(_save_on_a_full_disk, tmp_path / "run")
    assert all(
        "No space left on device" in message and "free some space" in message
        for message in messages
    )
    assert not (tmp_path / "run").exists()


def _save_on_a_full_disk(root):
    real = Path.open

    class Full:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.stream.close()

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def write(self, data):
            raise OSError(28, "No space left on device")

    def opened(self, mode="r", *args, **kwargs):
        stream = real(self, mode, *args, **kwargs)
        return Full(stream) if self.name == "__1_0.distcp" else stream  # only rank 1's disk is full

    Path.open = opened
    try:
        return _refusal(model_io.save_model, toy.build(tp=2), root, CONFIG)
    finally:
        Path.open = real


def test_known_names_are_data(two_workers):
    assert (
        loading.compare({}, {"optimizer.state.exp_avg.x": (1,)}, model_io.BESIDE_WEIGHTS).left_over
        == ()
    )
