# SPDX-License-Identifier: Apache-2.0
"""Settings of the Trainer, axolotl and LLaMA-Factory as settings on top of a recipe."""

import dataclasses
import json
import shlex

import pytest

from megatron.bridge.cli import from_trainer
from megatron.bridge.cli.from_trainer import translate
from megatron.bridge.cli.main import main
from megatron.bridge.cli.support.parser import Parser, add_shared
from megatron.bridge.cli.support.train_job import prepare
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

AXOLOTL = """
base_model: {model}
datasets:
  - path: {data}
    type: alpaca
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj, o_proj]
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1.5
learning_rate: 2e-4
lr_scheduler: cosine
optimizer: adamw_bnb_8bit
bf16: true
gradient_checkpointing: true
saves_per_epoch: 1
load_in_8bit: false
output_dir: runs/axolotl
"""
LLAMA_FACTORY = """
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: {data}
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
max_steps: 100
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: runs/factory
"""


def test_axolotl():
    run = translate(yaml_text.read(AXOLOTL.format(model="m", data="d.jsonl")), ranks=8)
    found = run.translation
    assert run.options == {
        "hf-model": "m",
        "data": "d.jsonl",
        "mode": "lora",
        "packed_sequence": "",
    }
    assert json.loads(found.settings["train.num_epochs"]) == 1.5
    assert json.loads(found.settings["train.global_batch_size"]) == 2 * 4 * 8
    assert found.settings["dataset.process_example_fn"] == "alpaca_example"
    assert json.loads(found.settings["peft.target_modules"]) == ["linear_qkv", "linear_proj"]
    assert (found.settings["model.seq_length"], found.settings["mixed_precision"]) == (
        "2048",
        "bf16_mixed",
    )
    assert found.missing.keys() == {"optim", "saves_per_epoch"}
    assert found.implied.keys() == {"load_in_8bit"}


def test_llama_factory():
    run = translate(yaml_text.read(LLAMA_FACTORY.format(model="m", data="d")), ranks=1)
    assert run.options["mode"] == "lora"
    assert run.translation.settings["train.train_iters"] == "100"
    assert run.translation.settings["scheduler.lr_warmup_fraction"] == "0.1"
    assert run.translation.missing.keys() == {"lora_target", "template"}


def test_names_of_the_trainer_are_its_own():
    from transformers import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    known = {
        "output_dir",
        "max_steps",
        "per_device_train_batch_size",
        "learning_rate",
        "adam_epsilon",
        "save_steps",
    }
    assert known <= theirs & from_trainer._SETTINGS.keys()
    run = translate(
        {"max_steps": -1, "num_train_epochs": 2.0, "lr_scheduler_type": "polynomial"}, 2
    )
    assert json.loads(run.translation.settings["train.num_epochs"]) == 2.0
    both = translate({"max_steps": 10, "num_train_epochs": 2.0}, 1).translation.settings
    assert both == {"train.train_iters": "10"}, "steps go before epochs"
    assert "polynomial" in run.translation.missing["lr_scheduler_type"]


@pytest.mark.parametrize(
    ("values", "key", "way_out"), [({"learning_rat": 1}, "learning_rat", "learning_rate")]
)
def test_mistakes(values, key, way_out):
    with pytest.raises(UserError) as caught:
        translate(values, 1)
    assert key in str(caught.value)
    assert way_out in str(caught.value)


def test_the_printed_command_runs_with_the_written_file(tmp_path, capsys):
    """The block of docs/faq.md."""
    source, output = tmp_path / "axolotl.yaml", tmp_path / "settings.yaml"
    source.write_text(
        "adapter: lora\nlearning_rate: 2e-4\nnum_epochs: 2\nmicro_batch_size: 2\noutput_dir: runs/x\n"
    )
    words = ["--recipe", "llama32_1b_finetune_config", "--output", str(output)]
    assert main(["from-trainer", str(source), *words]) == 0
    command = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert command[:2] == ["megatron-bridge", "train"]
    parser = Parser()
    add_shared(parser, "job")
    config = prepare(parser.parse_args(command[2:])).config
    assert (config.optimizer.lr, config.train.train_iters, config.checkpoint.save) == (
        2e-4,
        1000,
        "runs/x",
    )
    assert type(config.peft).__name__ == "LoRA"
    source.write_text("- a\n")
    assert main(["from-trainer", str(source)]) == 1
