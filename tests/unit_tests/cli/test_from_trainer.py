# SPDX-License-Identifier: Apache-2.0
"""Settings of the Trainer, axolotl and LLaMA-Factory as settings on top of a recipe."""

import dataclasses
import json
import shlex

import pytest

from megatron.bridge.cli import from_trainer
from megatron.bridge.cli.from_trainer import translate
from megatron.bridge.cli.main import main
from megatron.bridge.cli.migrate.trainer_defaults import FRAMEWORKS, TRAINER
from megatron.bridge.cli.support.options import add_recipe_options
from megatron.bridge.cli.support.parser import Parser
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


def test_regularization_and_the_batch_of_evaluations():
    values = {
        "max_length": 64,
        "neftune_noise_alpha": 5,
        "label_smoothing_factor": 0.1,
        "per_device_eval_batch_size": 4,
    }
    settings = translate(values, ranks=2).translation.settings
    assert json.loads(settings["train.neftune_noise_alpha"]) == 5
    assert json.loads(settings["train.label_smoothing"]) == 0.1
    assert json.loads(settings["validation.eval_micro_batch_size"]) == 4
    assert json.loads(settings["validation.eval_global_batch_size"]) == 8


def test_axolotl():
    run = translate(yaml_text.read(AXOLOTL.format(model="m", data="d.jsonl")), ranks=8)
    found = run.translation
    assert run.options == {
        "hf-model": "m",
        "data": "d.jsonl",
        "mode": "lora",
        "packed-sequence": "",
    }
    assert json.loads(found.settings["train.num_epochs"]) == 1.5
    assert json.loads(found.settings["train.global_batch_size"]) == 2 * 4 * 8
    assert found.settings["dataset.process_example_fn"] == "alpaca_example"
    assert json.loads(found.settings["peft.target_modules"]) == ["q_proj", "v_proj", "o_proj"]
    assert json.loads(found.settings["scheduler.lr_warmup_fraction"]) == 0.03
    assert found.settings["dataset.truncation"] == "drop"
    assert (found.settings["model.seq_length"], found.settings["mixed_precision"]) == (
        "2048",
        "bf16_mixed",
    )
    assert found.missing.keys() == {"optim", "saves_per_epoch", "warmup_ratio"}
    assert found.implied.keys() == {"load_in_8bit"}


def test_llama_factory():
    run = translate(yaml_text.read(LLAMA_FACTORY.format(model="m", data="d")), ranks=1)
    assert run.options["mode"] == "lora"
    assert run.translation.settings["train.train_iters"] == "100"
    assert run.translation.settings["scheduler.lr_warmup_fraction"] == "0.1"
    assert run.translation.missing.keys() == {"template"}
    assert json.loads(run.translation.settings["peft.target_modules"]) == ["all-linear"]


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
    assert both["train.train_iters"] == "10", "steps go before epochs"
    assert "train.num_epochs" not in both
    assert "polynomial" in run.translation.missing["lr_scheduler_type"]


def test_what_a_file_leaves_out_is_the_trainer_s():
    """transformers itself says what its defaults are."""
    from transformers import TrainingArguments

    trainer = TrainingArguments(output_dir="unused")
    assert {key: getattr(trainer, key) for key in TRAINER.defaults} == dict(TRAINER.defaults)
    settings = _settings({"learning_rate": 1e-4})
    assert settings["optimizer.weight_decay"] == trainer.weight_decay
    assert settings["optimizer.adam_beta2"] == trainer.adam_beta2
    assert settings["scheduler.lr_decay_style"] == trainer.lr_scheduler_type
    assert settings["scheduler.lr_warmup_iters"] == trainer.warmup_steps == 0
    assert settings["scheduler.lr_warmup_fraction"] is None
    assert settings["train.global_batch_size"] == trainer.per_device_train_batch_size
    assert settings["optimizer.min_lr"] == 0.0, "schedules of transformers end at 0"


def _settings(values, **options):
    found = translate(values, 1, **options).translation.settings
    return {key: yaml_text.read(value, key) for key, value in found.items()}


# values of the published sources: LLaMA-Factory 0.9.5, axolotl 0.21, TRL 1.16
DEFAULTS = {
    "LLaMA-Factory's alpha is twice the rank": (
        {"stage": "sft", "lora_rank": 16, "cutoff_len": 512, "dataset": "d"},
        {"peft.dim": 16, "peft.alpha": 32, "peft.dropout": 0.0, "optimizer.lr": 5e-5}
        | {"scheduler.lr_decay_style": "linear", "dataset.truncation": "right"},
    ),
    "LLaMA-Factory trains LoRA": (
        {"stage": "sft", "template": "llama3"},
        {"peft.dim": 8, "peft.alpha": 16, "peft.target_modules": ["all-linear"]}
        | {"dataset.seq_length": 2048, "train.global_batch_size": 8, "train.num_epochs": 3.0},
    ),
    "axolotl": (
        {"base_model": "m", "sequence_len": 64, "learning_rate": "2e-4", "warmup_steps": 1}
        | {"datasets": [{"path": "d"}]},
        {"scheduler.lr_decay_style": "cosine", "train.num_epochs": 1.0, "optimizer.lr": 2e-4}
        | {"train.global_batch_size": 1, "scheduler.lr_warmup_iters": 2}
        | {"dataset.truncation": "drop", "optimizer.adam_beta2": 0.999},
    ),
    "axolotl's warmup of few steps": (
        {"base_model": "m", "learning_rate": 1e-4, "max_steps": 200, "micro_batch_size": 2},
        {"scheduler.lr_warmup_iters": 6, "scheduler.lr_warmup_fraction": None},
    ),
    "TRL's SFTConfig": (
        {"dataset_text_field": "text", "use_peft": True, "dataset": "d"},
        {"optimizer.lr": 2e-5, "dataset.seq_length": 1024, "mixed_precision": "bf16_mixed"}
        | {"dataset.train_on": "everything", "peft.dim": 16, "peft.dropout": 0.05},
    ),
    "TRL's DPOConfig": (
        {"beta": 0.2, "precompute_ref_log_probs": False, "dataset": "d"},
        {"optimizer.lr": 1e-6, "dpo.beta": 0.2, "dataset.truncation": "right"},
    ),
    "constant has no warmup": (
        {"lr_scheduler_type": "constant", "warmup_steps": 10},
        {"scheduler.lr_decay_style": "constant", "scheduler.lr_warmup_iters": 0},
    ),
    "no half precision": ({"bf16": False}, {"mixed_precision": "fp32"}),
    "a share of steps": (
        {"warmup_steps": 0.1},
        {"scheduler.lr_warmup_iters": 0, "scheduler.lr_warmup_fraction": 0.1},
    ),
}


@pytest.mark.parametrize("case", DEFAULTS)
def test_defaults_of_the_framework(case):
    values, expected = DEFAULTS[case]
    found = _settings(values)
    assert {key: found.get(key) for key in expected} == expected


def test_stage_and_adapter_are_both_kept():
    values = {"finetuning_type": "lora", "stage": "dpo", "pref_beta": 0.3}
    assert translate(values, 1).options == {"mode": "dpo", "peft-scheme": "lora"}
    full = translate({"finetuning_type": "full", "lora_rank": 8, "stage": "sft"}, 1)
    assert full.options["mode"] == "sft"
    assert not any(key.startswith("peft.") for key in full.translation.settings)


def test_a_key_that_is_unknown_is_reported_and_stops_nothing():
    found = translate({"a_new_switch_of_the_cluster": 3, "learning_rate": 1e-4}, 1).translation
    assert "a_new_switch_of_the_cluster" in found.missing
    assert found.settings["optimizer.lr"] == "0.0001"


WRONG = {
    "batch": (
        {"per_device_train_batch_size": -4},
        ["per_device_train_batch_size=-4", "at least 1"],
    ),
    "not a number": ({"learning_rate": float("nan")}, ["learning_rate=nan"]),
    "a word": ({"lora_r": "many"}, ["lora_r=many", "whole number"]),
    "a name of the file": ({"cutoff_len": 0}, ["cutoff_len=0"]),
    "a number as a key": ({5: 6}, ["5 is not a name"]),
    "a stage of another kind": ({"stage": "ppo"}, ["stage=ppo", "sft"]),
    "an adapter of another kind": ({"finetuning_type": "oft"}, ["oft", "lora"]),
    "no rank": ({"adapter": "lora", "base_model": "m"}, ["lora_r", "add it"]),
    "betas": ({"adam_beta1": 3}, ["adam_beta1=3", "0 to 1"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_nonsense_is_refused(case):
    values, words = WRONG[case]
    with pytest.raises(UserError) as caught:
        translate(values, 1)
    for word in words:
        assert word in str(caught.value)


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
        "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nlearning_rate: 2e-4\nnum_epochs: 2\n"
        "micro_batch_size: 2\noutput_dir: runs/x\n"
    )
    words = ["--recipe", "llama32_1b_finetune_config", "--output", str(output)]
    assert main(["from-trainer", str(source), *words]) == 0
    command = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert command[:2] == ["megatron-bridge", "train"]
    parser = Parser()
    add_recipe_options(parser)
    config = prepare(parser.parse_args(command[2:])).config
    assert (config.optimizer.lr, config.train.train_iters, config.checkpoint.save) == (
        2e-4,
        1000,
        "runs/x",
    )
    assert type(config.peft).__name__ == "LoRA"
    assert (config.peft.dim, config.peft.alpha) == (8, 16)
    assert (config.optimizer.adam_beta2, config.optimizer.weight_decay) == (0.999, 0.0)
    assert config.scheduler.lr_warmup_fraction == 0.03
    source.write_text("- a\n")
    assert main(["from-trainer", str(source)]) == 1


GRPO = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "learning_rate": 5e-6,
    "beta": 0.04,
    "num_generations": 4,
    "max_completion_length": 256,
    "loss_type": "dr_grpo",
    "scale_rewards": False,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "use_vllm": True,
    "vllm_mode": "colocate",
}


def test_files_of_rewards():
    """Names are the same; a generation is counted in steps here, and in microbatches in TRL."""
    translated = translate(GRPO, 2)
    settings = translated.translation.settings
    assert translated.framework.name == "TRL's GRPOConfig"
    assert translated.options["mode"] == "grpo"
    expected = {
        "grpo.beta": "0.04",
        "grpo.num_generations": "4",
        "grpo.max_completion_length": "256",
        "grpo.loss_type": "dr_grpo",
        "grpo.scale_rewards": "none",
        "grpo.steps_per_generation": "2",
        "train.global_batch_size": "16",
        "optimizer.lr": "5e-06",
        "optimizer.weight_decay": "0.0",
        "mixed_precision": "bf16_mixed",
    }
    assert {key: settings[key] for key in expected} == expected
    assert not [key for key in settings if key.startswith("dpo.")]
    assert {"use_vllm", "vllm_mode", "reward functions"} <= translated.translation.missing.keys()
    assert "beta" not in translated.translation.implied


def test_silent_files_of_rewards_have_the_defaults_of_their_framework():
    settings = translate({"num_generations": 8}, 1).translation.settings
    assert settings["optimizer.lr"] == "1e-06"
    assert settings["grpo.loss_type"] == "dapo"
    assert settings["grpo.beta"] == "0.0"
    assert "grpo.steps_per_generation" not in settings


def test_files_of_on_policy_distillation():
    values = {"teacher_model_name_or_path": "Qwen/Qwen3-8B", "lmbda": 0.25, "max_new_tokens": 64}
    translated = translate({**values, "seq_kd": True}, 2)
    assert translated.framework.name == "TRL's GKDConfig"
    assert translated.options["mode"] == "distill"
    expected = {
        "distill.teacher": "Qwen/Qwen3-8B",
        "distill.on_policy_fraction": "0.25",
        "distill.max_completion_length": "64",
        "distill.jsd_beta": "0.5",
        "distill.completion_temperature": "0.9",
        "distill.ce_weight": "0.0",
        "distill.kl_weight": "1.0",
        "optimizer.lr": "2e-05",
    }
    settings = translated.translation.settings
    assert {key: settings[key] for key in expected} == expected
    assert not [key for key in settings if key.startswith(("dpo.", "grpo."))]
    assert "seq_kd" in translated.translation.missing
    assert "dataset.train_on=last" in translated.translation.missing["dataset"]
    assert "beta" not in translated.translation.implied


def test_beta_may_be_zero_but_for_preferences():
    for values, key in (
        ({"num_generations": 8}, "grpo.beta"),
        ({"lmbda": 0.5}, "distill.jsd_beta"),
    ):
        assert translate({**values, "beta": 0}, 1).translation.settings[key] == "0"
    with pytest.raises(UserError, match=r"beta=0.*above 0"):
        translate({"beta": 0, "precompute_ref_log_probs": True}, 1)


def test_a_generation_of_rewards_is_whole_steps():
    halves = {**GRPO, "steps_per_generation": 3}
    with pytest.raises(UserError, match=r"steps_per_generation=3.*multiple"):
        translate(halves, 1)
    by_size = {key: value for key, value in GRPO.items() if key != "steps_per_generation"}
    by_size["generation_batch_size"] = 32
    settings = translate(by_size, 2).translation.settings
    assert settings["grpo.steps_per_generation"] == "2"


def test_keys_of_rewards_in_a_file_that_is_read_as_another():
    """Under ``beta``, preferences mean something else."""
    with pytest.raises(UserError) as refusal:
        translate({"beta": 0.04, "num_generations": 8}, 1, FRAMEWORKS["trl-dpo"])
    for word in ("num_generations=8", "GRPOConfig", "DPOConfig", "--framework trl-grpo"):
        assert word in str(refusal.value)
