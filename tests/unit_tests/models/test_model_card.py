# SPDX-License-Identifier: Apache-2.0
"""The card of an exported model says what it is, keeps what its source says, and claims nothing that is not so."""

import json
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import model_io
from megatron.bridge.models.hf_pretrained.model_card import (
    History,
    compose,
    last_losses,
    public_name,
)
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks.observe import report
from megatron.bridge.utils import loss_curves
from megatron.bridge.utils.config.serialize import to_plain
from tests.toy_models import make_llama

THEIRS = """---
license: llama3.2
language:
- en
- de
tags: chat
base_model: maker/grandparent
model-index:
- name: base
  results: []
---
# Base

A model for talks -- größer.
"""
TRAINED = History(steps=1200, losses={"train": 1.23456, "validation": 1.5})


def parsed(text):
    """As the hub reads it."""
    card = ModelCard(text)
    return card.data.to_dict(), card.text


def test_a_converted_model_keeps_the_card_of_its_source():
    assert compose("out", "maker/base", THEIRS, History()) == THEIRS


def test_a_trained_model_says_so_above_what_its_source_says():
    metadata, text = parsed(compose("tuned", "maker/base", THEIRS, TRAINED))
    assert metadata["license"] == "llama3.2"
    assert metadata["language"] == ["en", "de"]
    assert metadata["base_model"] == "maker/base"
    assert metadata["tags"] == ["chat", "megatron-bridge"]
    assert "model-index" not in metadata  # its scores are not this model's
    assert text.index("Trained for 1,200 steps") < text.index("A model for talks -- größer.")
    assert "| training | 1.2346 |\n| validation | 1.5000 |" in text
    assert text.strip().startswith("# tuned")


def test_adapters_and_notes_are_told():
    text = compose(
        "merged", "maker/base", THEIRS, History(adapters="LoRA of rank 8", note="Halved.")
    )
    assert "Adapters were merged into the weights: LoRA of rank 8.\nHalved." in text
    assert "Trained" not in text


def test_a_model_trained_from_scratch_has_no_base_model():
    metadata, text = parsed(compose("own", "maker/base", None, History(steps=5, from_scratch=True)))
    assert "base_model" not in metadata
    assert "Config and tokenizer of maker/base." in text
    assert "Trained for 5 steps with Megatron-Core, from random weights." in text


def test_without_a_card_one_is_made_that_claims_nothing():
    metadata, text = parsed(compose("out", "local-folder", None, History()))
    assert metadata == {
        "library_name": "transformers",
        "tags": ["megatron-bridge"],
    }  # a folder is no hub id
    assert "Base model: local-folder." in text
    assert "Trained" not in text


@pytest.mark.parametrize(
    "damaged", ["---\n: [\n---\nText\n", "---\n- a list\n---\nText\n", "no metadata\n"]
)
def test_metadata_that_cannot_be_read_is_kept_as_text(damaged):
    card = compose("out", "maker/base", damaged, TRAINED)
    assert damaged.strip() in card
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "maker/base"


def test_names_tell_no_paths(tmp_path):
    assert public_name("maker/base") == "maker/base"
    assert public_name(str(tmp_path)) == tmp_path.name
    cached = "/home/me/.cache/huggingface/hub/models--maker--base/snapshots/0123"
    assert public_name(cached) == "maker/base"


def test_losses_are_those_of_the_step_that_is_exported(tmp_path):
    lines = [
        {"step": 10, "kind": "train", report.LOSS: 3.0},
        {"step": 10, "kind": "validation", report.LOSS: 3.5},
        {"step": 20, "kind": "train", report.LOSS: 2.0},
        {"step": 25, "kind": "train", "grad norm": 1.0},
    ]
    (tmp_path / loss_curves.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (tmp_path / loss_curves.METRICS).open("a") as file:
        file.write('{"step": 30, "ki')  # a run that was killed
    assert last_losses(tmp_path, 30) == {"train": 2.0, "validation": 3.5}
    assert last_losses(tmp_path, 15) == {"train": 3.0, "validation": 3.5}
    assert last_losses(tmp_path / "absent", 15) == {}
    (tmp_path / loss_curves.METRICS).write_text('{"step": 1\n')
    assert last_losses(tmp_path, 15) == {}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    make_llama(directory, num_hidden_layers=1)
    (directory / "README.md").write_text(THEIRS)
    return directory


@pytest.mark.parametrize("start", ["maker/base", None])
def test_an_exported_checkpoint_tells_what_its_run_did(hf, tmp_path, start):
    bridge = AutoBridge.from_hf_pretrained(hf)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    config = {
        "model": to_plain(model[0].config.declared),
        "checkpoint": {"pretrained_checkpoint": start},
    }
    model_io.save_model(model, tmp_path / "run", config, iteration=30)
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": 30, "kind": "test", "lm loss": 0.5}\n'
    )
    (tmp_path / "run" / "loss.png").write_bytes(b"curves of this run")
    (hf / "loss.png").write_bytes(b"curves of the base")
    bridge.export_ckpt(tmp_path / "run", tmp_path / "tuned", show_progress=False)
    metadata, text = parsed((tmp_path / "tuned" / "README.md").read_text())
    assert metadata["license"] == "llama3.2"
    assert "# tuned" in text
    assert (
        f"Trained for 30 steps with Megatron-Core, from {'the base' if start else 'random'}" in text
    )
    assert "| test | 0.5000 |" in text
    assert str(tmp_path) not in text
    assert (tmp_path / "tuned" / "loss.png").read_bytes() == b"curves of this run"
    config_file = tmp_path / "tuned" / "run_config.yaml"
    assert (
        config_file.read_bytes()
        == (tmp_path / "run" / "iter_0000030" / config_file.name).read_bytes()
    )


def test_adapters_in_a_model_in_memory_are_told(hf, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(hf)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    LoRA(dim=4)(model)
    bridge.save_hf_pretrained(model, tmp_path / "merged", show_progress=False)
    bridge.save_hf_pretrained(
        model, tmp_path / "base", show_progress=False, merge_adapter_weights=False
    )
    assert "LoRA of rank 4" in (tmp_path / "merged" / "README.md").read_text()
    assert (tmp_path / "base" / "README.md").read_text() == THEIRS


def test_a_source_without_a_card_or_weights(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "hf", ignore=shutil.ignore_patterns("README.md"))
    for bridge in (
        AutoBridge.from_hf_pretrained(tmp_path / "hf"),
        AutoBridge.from_hf_config(AutoBridge.from_hf_pretrained(hf).hf_config),
    ):
        model = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)
        out = tmp_path / type(bridge.hf_pretrained).__name__
        bridge.save_hf_pretrained(model, out, show_progress=False)
        assert parsed((out / "README.md").read_text())[0]["tags"] == ["megatron-bridge"]
