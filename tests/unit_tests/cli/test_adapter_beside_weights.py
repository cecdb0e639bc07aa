# SPDX-License-Identifier: Apache-2.0
"""A folder with a model and an adapter, which transformers applies to it."""

import peft
import pytest

from megatron.bridge.cli.main import main
from tests.toy_models import make_llama


@pytest.fixture
def folder(tmp_path):
    model = make_llama(tmp_path / "hf", num_hidden_layers=1)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_it_is_refused_or_left_out_on_purpose(folder, tmp_path, capsys):
    megatron = str(tmp_path / "megatron")
    convert = ["convert", "--hf-model", str(folder), "--megatron-path", megatron]
    verify = ["verify", str(folder), megatron]
    assert main(convert) == 1
    assert main([*convert, "--adapter", "none"]) == 0
    assert main(verify) == 1
    error = capsys.readouterr().err
    assert error.count("adapter merge") == error.count("--adapter none") == 2
    assert main([*verify, "--adapter", "none"]) == 0


def test_a_merged_export_holds_the_model_alone(folder, tmp_path):
    paths = ["--adapter", str(folder), "--hf-model", str(folder)]
    assert main(["adapter", "merge", *paths, "--hf-path", str(tmp_path / "merged")]) == 0
    assert not list((tmp_path / "merged").glob("adapter_*"))
