# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face config of a model that only a Megatron checkpoint describes."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.conversion import pretrained
from megatron.bridge.models.conversion.describe import architectures_of
from megatron.bridge.models.conversion.model_bridge import bridge_for
from tests.families.own_models import model_class
from tests.families.rows import ROWS
from tests.refusals import says
from tests.toy_models import make_llama
from tests.unit_tests.project.tree import ROOT

TOKENIZER = ROOT / "tutorials" / "data" / "tokenizer"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if hasattr(transformers, row.model)]
)
def test_a_familys_own_architecture_is_found(name):
    row = ROWS[name]
    config = model_class(row.model).config_class(**row.config)
    config.architectures = [row.model]
    provider = bridge_for(config).provider_bridge(SimpleNamespace(config=config))
    assert row.model in architectures_of(provider)


@pytest.fixture
def checkpoint(tmp_path):
    """A Megatron checkpoint, and the model that it came from."""
    source = tmp_path / "source"
    source.mkdir()
    make_llama(source, vocab_size=512, dtype=torch.bfloat16)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, source)
    AutoBridge.import_ckpt(source, tmp_path / "megatron", show_progress=False)
    return AutoModelForCausalLM.from_pretrained(source), tmp_path / "megatron"


def test_an_export_without_a_source(checkpoint, tmp_path, capfd):
    model, megatron = checkpoint
    output = tmp_path / "out"
    assert (
        main(
            ["export", "--megatron-path", str(megatron), "--hf-path", str(output), "--no-progress"]
        )
        == 0
    )
    assert "128004" not in capfd.readouterr().err  # the default padding token of SmolLM3's config
    exported = AutoModelForCausalLM.from_pretrained(output)
    for (name, ours), theirs in zip(
        exported.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs), name
    ids = torch.arange(5, 25)[None]
    assert torch.equal(exported(ids).logits, model(ids).logits)
    tokenizer, config = AutoTokenizer.from_pretrained(output), AutoConfig.from_pretrained(output)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(TOKENIZER).get_vocab()
    assert config.eos_token_id == tokenizer.eos_token_id
    assert "Base model: megatron." in (output / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["--architecture", "Qwen3ForCausalLM"],
            ["--architecture Qwen3ForCausalLM", "LlamaForCausalLM"],
        ),
        (
            ["--architecture", "LlamForCausalLM"],
            ["--architecture LlamForCausalLM", "LlamaForCausalLM"],
        ),
        (
            ["--architecture", "LlamaForCausalLM", "--hf-model", "x"],
            ["--architecture", "--hf-model", "leave one"],
        ),
    ],
)
def test_an_architecture_that_is_not_the_models(checkpoint, tmp_path, capsys, words, parts):
    command = [
        "export",
        "--megatron-path",
        str(checkpoint[1]),
        "--hf-path",
        str(tmp_path / "out"),
        *words,
    ]
    assert main(command) == 1
    assert says(capsys.readouterr().err.strip(), *parts)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_a_run_may_be_in_a_folder_without_a_config(tmp_path):
    """PreTrainedTokenizerFast.save_pretrained writes no config.json."""
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert pretrained.tokenizer_of(tmp_path) == str(tmp_path)
