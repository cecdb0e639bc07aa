# SPDX-License-Identifier: Apache-2.0
"""Saves into a folder that holds files: whole or not at all after a kill at any moment, and others stay."""

import itertools
import json
import os
import shutil

import pytest

from megatron.bridge.models.hf_pretrained import model_folder
from megatron.bridge.utils.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MUTATIONS = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")
SHARDS = {"one": 1, "two": 2}


def stage(folder, tag, shards, config=None):
    """A staging directory with a save whose files all say ``tag``."""
    staging = model_folder.create_staging(folder)
    names = [f"model-{index:05d}-of-{shards:05d}.safetensors" for index in range(1, shards + 1)]
    if shards == 1:
        names = [SINGLE]
    renamed = model_folder.unused_names(folder, names)
    names = [renamed.get(name, name) for name in names]
    for name in names:
        (staging / name).write_text(tag)
    if shards > 1:
        (staging / INDEX).write_text(
            json.dumps({"weight_map": {str(at): name for at, name in enumerate(names)}})
        )
    if config is not None:
        (staging / "config.json").write_text(json.dumps({"of": config}))
    return staging


def save(folder, tag, shards, config=None):
    model_folder.publish(stage(folder, tag, shards, config), folder)


def read(folder):
    """What a reader finds, as transformers looks for it: (tags of the weights, config); None if it refuses."""
    if (folder / SINGLE).exists():
        names = [SINGLE]
    elif (folder / INDEX).exists():
        names = list(json.loads((folder / INDEX).read_text())["weight_map"].values())
    else:
        return None
    config = folder / "config.json"
    return {
        (folder / name).read_text() for name in names
    }, config.read_text() if config.exists() else None


def killed_at(step, action):
    """Run ``action`` in a process that ends before its ``step``-th change of the disk; whether it ended."""
    child = os.fork()
    if child == 0:
        counter = itertools.count()
        for name in MUTATIONS:
            setattr(os, name, dying(getattr(os, name), counter, step))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def dying(change, counter, step):
    def changed(*args, **options):
        if next(counter) == step:
            os._exit(9)
        return change(*args, **options)

    return changed


@pytest.mark.sampled
@pytest.mark.parametrize("configs", [("a", "a"), ("a", "b")], ids=["same config", "other config"])
@pytest.mark.parametrize(
    ("before", "after"), [("one", "one"), ("one", "two"), ("two", "one"), ("two", "two")]
)
def test_a_kill_leaves_no_mixture(tmp_path, before, after, configs):
    folder, copy = tmp_path / "out", tmp_path / "copy"
    save(folder, "old", SHARDS[before], configs[0])
    old = read(folder)
    (folder / "notes.txt").write_text("mine")
    shutil.copytree(folder, copy)
    for step in itertools.count():
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        finished = killed_at(step, lambda: save(folder, "new", SHARDS[after], configs[1]))
        new = ({"new"}, json.dumps({"of": configs[1]}))
        assert read(folder) in (old, new, None), f"step {step}"
        if configs[0] == configs[1]:
            assert read(folder) in (old, new), f"step {step}"
        save(folder, "next", SHARDS[before], configs[0])
        assert read(folder) == ({"next"}, json.dumps({"of": configs[0]}))
        assert (folder / "notes.txt").read_text() == "mine"
        weights = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        assert len(weights) == SHARDS[before], "nothing of a killed save is left"
        if finished:
            break
    assert step > 5
    assert not (tmp_path / "out.incomplete").exists()


def test_files_of_others_stay(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4, "theirs": true}')
    (folder / "tokenizer.json").write_text("theirs")
    staging = stage(folder, "new", 2)
    (staging / "config.json").write_text('{"hidden_size": 4}')
    (staging / "tokenizer.json").write_text("ours")
    (staging / "README.md").write_text("ours")
    model_folder.publish(staging, folder)
    assert json.loads((folder / "config.json").read_text())["theirs"]
    assert (folder / "tokenizer.json").read_text() == "theirs"
    assert (folder / "README.md").read_text() == "ours"
    assert read(folder)[0] == {"new"}


def test_config_of_another_model_is_refused_before_anything_changes(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    staging = stage(folder, "new", 1)
    (staging / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(UserError, match=r"hidden_size=8 .* hidden_size=4: remove"):
        model_folder.publish(staging, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]


def test_weights_of_others_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / SINGLE).write_text("theirs")
    with pytest.raises(
        UserError, match=r"holds model\.safetensors, which no save .*: remove it or choose another"
    ):
        save(tmp_path / "out", "new", 1)


def test_weights_that_somebody_changed_are_refused(tmp_path):
    save(tmp_path / "out", "old", 2)
    path = tmp_path / "out" / "model-00001-of-00002.safetensors"
    path.write_text("changed by hand")
    with pytest.raises(UserError, match=r"holds model-00001-of-00002\.safetensors, which no save"):
        save(tmp_path / "out", "new", 2)


def test_an_earlier_save_is_replaced_on_request_only(tmp_path):
    save(tmp_path / "out", "old", 2)
    with pytest.raises(UserError, match="set overwrite=True"):
        model_folder.create_staging(tmp_path / "out", overwrite=False)
    save(tmp_path / "out", "new", 2)
    assert read(tmp_path / "out") == ({"new"}, None)


def test_a_damaged_record_makes_nothing_ours(tmp_path):
    save(tmp_path / "out", "old", 1)
    (tmp_path / "out" / model_folder.RECORD).write_text("{")
    assert model_folder.published(tmp_path / "out") == {}
