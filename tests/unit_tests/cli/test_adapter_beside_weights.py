# SPDX-License-Identifier: Apache-2.0
"""A folder with a model and an adapter, which transformers applies to it."""

import re

import peft
import pytest
import torch
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture


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


def test_every_reader_of_weights_refuses_it(folder, tokenizer_dir, capsys):  # noqa: F811
    sentence = r"holds a model and an adapter.*adapter merge .*--adapter none"
    with pytest.raises(UserError, match=sentence):
        AutoBridge.from_hf_pretrained(folder).to_megatron_provider()
    model = AutoBridge.from_hf_pretrained(folder, adapter="none").to_megatron_model(
        wrap_with_ddp=False
    )
    with pytest.raises(UserError, match=sentence):
        AutoBridge.from_hf_pretrained(folder).load_hf_weights(model)
    assert main(["generate", str(folder), "--prompt", "a"]) == 1
    assert main(["serve", str(folder)]) == 1
    data = folder.parent / "data"
    data.mkdir()
    (data / "training.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    train = ["train", "--recipe", "smollm2_135m_finetune_config", "--hf-model", str(folder)]
    train += ["--data", str(data), "--dry-run", f"tokenizer.tokenizer_model={tokenizer_dir}"]
    assert main(train) == 1
    shown = "".join(capsys.readouterr())
    assert len(re.findall("holds a model and an adapter", shown)) == 3, shown
    main([*train, "checkpoint.ignore_adapter=true"])
    assert "holds a model and an adapter" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("recipe", "key"),
    [("smollm2_50m_distill_config", "distill.teacher"), ("llama32_1b_dpo_config", "dpo.reference")],
)
def test_a_dry_run_refuses_it_as_a_second_model(folder, capsys, recipe, key):
    train = ["train", "--recipe", recipe, "--dry-run", f"{key}={folder}"]
    assert main(train) == 1
    assert "holds a model and an adapter" in "".join(capsys.readouterr())


def test_a_dry_run_notes_weights_of_another_function(tmp_path, capsys):
    make_llama(tmp_path, num_hidden_layers=1)
    train = ["train", "--recipe", "llama32_1b_pretrain_config", "--hf-model", str(tmp_path)]
    train += ["--dry-run", f"checkpoint.pretrained_checkpoint={tmp_path}", "model.rotary_base=77"]
    main(train)
    shown = "".join(capsys.readouterr())
    assert "a model that computes something else: model.rotary_base is 77.0" in shown


@torch.no_grad()
def test_generation_applies_the_adapter_that_is_asked_for(folder):
    """The folder as ``adapter`` gives the tokens of transformers, which applies it unasked."""
    ids = torch.arange(1, 9)[None]
    applied = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = applied.generate(
        ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    tokens = {}
    for adapter in (str(folder), "none"):
        with LLM(str(folder), adapter=adapter, kv_memory=1 << 24) as llm:
            ((completion,),) = llm.generate([ids[0].tolist()], sampling)
            tokens[adapter] = list(completion.tokens)
    assert tokens[str(folder)] == expected[0, 8:].tolist()
    assert tokens["none"] != tokens[str(folder)]


def test_a_merged_export_holds_the_model_alone(folder, tmp_path):
    paths = ["--adapter", str(folder), "--hf-model", str(folder)]
    assert main(["adapter", "merge", *paths, "--hf-path", str(tmp_path / "merged")]) == 0
    assert not list((tmp_path / "merged").glob("adapter_*"))
