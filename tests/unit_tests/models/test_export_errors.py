# SPDX-License-Identifier: Apache-2.0
"""An export that cannot be finished says why and leaves nothing behind."""

import errno
import os
import shutil

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.engine import side_files
from megatron.bridge.models.hf_pretrained import safetensors_writer
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    make_llama(directory, num_hidden_layers=1)
    bridge = AutoBridge.from_hf_pretrained(directory)
    return bridge, bridge.to_megatron_model(wrap_with_ddp=False)


def leftovers(directory):
    return sorted(path.name for path in directory.iterdir())


def test_existing_output(converted, tmp_path):
    bridge, model = converted
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    with pytest.raises(
        UserError, match=r"holds model\.safetensors, which no save .*: remove it or choose another"
    ):
        bridge.save_hf_pretrained(model, tmp_path / "out")
    assert leftovers(tmp_path) == ["out"]
    assert leftovers(tmp_path / "out") == ["model.safetensors"]


def test_output_below_a_file(converted, tmp_path):
    bridge, model = converted
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        bridge.save_hf_pretrained(model, tmp_path / "file" / "out")


def test_no_room_for_the_model(converted, tmp_path, monkeypatch):
    bridge, model = converted
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(safetensors_writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"has 0\.00 GB free and the model needs"):
        bridge.save_hf_pretrained(model, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_disk_that_fills_up_while_writing(converted, tmp_path, monkeypatch):
    bridge, model = converted
    write, written = os.pwrite, []

    def pwrite(descriptor, data, position):
        written.append(len(data))
        if len(written) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, position)

    monkeypatch.setattr(safetensors_writer.os, "pwrite", pwrite)
    with pytest.raises(UserError, match="the disk is full"):
        bridge.save_hf_pretrained(model, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_interrupted_export_leaves_no_model(converted, tmp_path, monkeypatch):
    bridge, model = converted

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(side_files, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bridge.save_hf_pretrained(model, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_strict_export_refuses_another_source(converted, tmp_path):
    bridge, model = converted
    make_llama(tmp_path / "hf", num_hidden_layers=2)
    with pytest.raises(
        UserError, match=r"layers\.1\.\S+ of the checkpoint has no Megatron parameter"
    ):
        bridge.save_hf_pretrained(model, tmp_path / "out", source_path=tmp_path / "hf")
    bridge.save_hf_pretrained(model, tmp_path / "out", source_path=tmp_path / "hf", strict=False)
    assert "model.safetensors.index.json" in leftovers(tmp_path / "out")
