# SPDX-License-Identifier: Apache-2.0
"""Headers and indices of weights with values that no program writes, and pipes in the place of files."""

import json
import os

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.hf_pretrained.safetensors_files import read_header
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama


@pytest.mark.parametrize("item", [{"data_offsets": [0.0, 8.0]}, {"shape": [2.0]}, {"shape": [-2]}])
def test_numbers_of_a_header_that_are_not_whole(tmp_path, item):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **item}
    header = json.dumps({"weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match="has a damaged header"):
        read_header(path)


@pytest.mark.parametrize("name", ["x" * 5000 + ".safetensors", "../model.safetensors"])
def test_a_shard_that_is_no_file_of_the_folder(tmp_path, name):
    make_llama(tmp_path, num_hidden_layers=1)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="a shard must be a file of this folder"):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="cannot be read: it is a pipe"):
        strict_json.read(pipe)
    assert main(["train", "--config", str(pipe), "--dry-run"]) == 1
    assert "it is a pipe" in capsys.readouterr().err
    assert main(["from-trainer", str(pipe)]) == 1
    assert "it is a pipe" in capsys.readouterr().err
