# SPDX-License-Identifier: Apache-2.0
"""What other trainers assume where a file is silent, and the values that they accept."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TRAINER: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "seed": 42,
}
"""``TrainingArguments`` of transformers 5.23, on which the others build."""


@dataclass(frozen=True)
class Framework:
    """A trainer whose settings can be translated."""

    name: str
    marks: frozenset[str]
    """Keys that only this one has."""
    defaults: Mapping[str, Any]
    """Values of keys that are not given, by the names that the tables use."""
    dataset: Mapping[str, str]
    """Settings of records that its defaults imply; empty if it says nothing about data."""
    adapters: Mapping[str, Any]
    """Values of adapter keys that are not given, if an adapter is trained."""


TRAINER = Framework("TrainingArguments", frozenset(), _TRAINER, {}, {})
_OF_TRL = {"max_length": 1024, "bf16": True}
_PEFT_OF_TRL = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target": "all-linear"}
TRL_SFT = Framework(
    "TRL's SFTConfig",
    frozenset(
        {"assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing_strategy"}
        | {"chat_template_path", "padding_free", "eval_packing", "dataset_kwargs", "use_peft"}
        | {"max_length", "packing"}
    ),
    {**_TRAINER, **_OF_TRL, "learning_rate": 2e-5},
    # a conversation is in the loss as a whole unless assistant_only_loss is set
    {"dataset.train_on": "everything", "dataset.truncation": "right"},
    _PEFT_OF_TRL,
)
TRL_DPO = Framework(
    "TRL's DPOConfig",
    frozenset({"beta", "precompute_ref_log_probs", "sync_ref_model", "ld_alpha"}),
    {**_TRAINER, **_OF_TRL, "learning_rate": 1e-6, "beta": 0.1, "stage": "dpo"},
    {"dataset.truncation": "right"},
    _PEFT_OF_TRL,
)
AXOLOTL = Framework(
    "axolotl",
    frozenset(
        {"base_model", "datasets", "adapter", "micro_batch_size", "sequence_len", "num_epochs"}
        | {"lr_scheduler", "optimizer", "sample_packing", "train_on_inputs", "val_set_size", "rl"}
        | {"special_tokens", "dataset_prepared_path", "lora_target_linear", "flash_attention"}
        | {"pad_to_sequence_len", "wandb_name", "evals_per_epoch", "saves_per_epoch"}
    ),
    {
        **{key: value for key, value in _TRAINER.items() if key != "learning_rate"},
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1.0,
        "lr_scheduler_type": "cosine",
        "max_length": 512,
        "warmup_steps": None,
        "warmup_ratio": 0.03,
    },
    {"dataset.train_on": "assistant", "dataset.truncation": "drop"},
    {"lora_dropout": 0.0},
)
LLAMA_FACTORY = Framework(
    "LLaMA-Factory",
    frozenset(
        {"finetuning_type", "stage", "template", "cutoff_len", "lora_rank", "lora_target"}
        | {"dataset_dir", "pref_beta", "pref_loss", "plot_loss", "overwrite_cache", "val_size"}
        | {"preprocessing_num_workers", "quantization_bit", "train_on_prompt", "mask_history"}
        | {"max_samples", "neat_packing", "flash_attn", "dataset"}
    ),
    {**_TRAINER, "max_length": 2048, "stage": "sft", "finetuning_type": "lora"},
    {"dataset.train_on": "assistant", "dataset.truncation": "right"},
    {"lora_r": 8, "lora_dropout": 0.0, "lora_target": "all"},
)
TRL_GRPO = Framework(
    "TRL's GRPOConfig",
    frozenset(
        {"num_generations", "max_completion_length", "generation_batch_size"}
        | {"steps_per_generation", "num_iterations", "scale_rewards", "reward_weights"}
        | {"epsilon_high", "importance_sampling_level", "mask_truncated_completions"}
    ),
    {**_TRAINER, "bf16": True, "learning_rate": 1e-6, "loss_type": "dapo", "beta": 0.0},
    {},
    _PEFT_OF_TRL,
)
TRL_GKD = Framework(
    "TRL's GKDConfig",
    frozenset({"lmbda", "seq_kd", "teacher_model_name_or_path", "teacher_model_init_kwargs"}),
    {
        **TRL_SFT.defaults,
        "temperature": 0.9,
        "lmbda": 0.5,
        "beta": 0.5,
        "max_new_tokens": 128,
    },
    {"dataset.train_on": "last", "dataset.truncation": "right"},
    _PEFT_OF_TRL,
)
FRAMEWORKS = {
    "trainer": TRAINER,
    "trl-sft": TRL_SFT,
    "trl-dpo": TRL_DPO,
    "trl-grpo": TRL_GRPO,
    "trl-gkd": TRL_GKD,
    "axolotl": AXOLOTL,
    "llama-factory": LLAMA_FACTORY,
}


def framework_of(keys: Iterable[str]) -> Framework:
    """Return the framework with the most keys of its own in a file; without any, it is the Trainer.

    TRL's GRPOConfig has most keys of its DPOConfig, and its GKDConfig those of its SFTConfig, so a single key of their
    own decides.
    """
    given = set(keys)
    for framework in (TRL_GRPO, TRL_GKD):
        if framework.marks & given:
            return framework
    return max(FRAMEWORKS.values(), key=lambda framework: len(framework.marks & given))


@dataclass(frozen=True)
class _Range:
    """The numbers that a key accepts."""

    rule: str
    least: float
    most: float = math.inf
    is_whole: bool = False
    has_least: bool = True  # whether ``least`` itself is accepted

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not math.isfinite(value) or (self.is_whole and value != int(value)):
            return False
        above = value >= self.least if self.has_least else value > self.least
        return above and value <= self.most


_COUNT = _Range("a whole number of at least 1", 1, is_whole=True)
_WHOLE = _Range("a whole number of at least 0", 0, is_whole=True)
_POSITIVE = _Range("a number above 0", 0, has_least=False)
_FROM_ZERO = _Range("a number of at least 0", 0)
_SHARE = _Range("a number from 0 to 1", 0, 1)
_RANGES = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _COUNT),
    **dict.fromkeys(("lora_r", "max_length", "save_total_limit", "dataset_num_proc"), _COUNT),
    **dict.fromkeys(("seed", "dataloader_num_workers"), _WHOLE),
    **dict.fromkeys(("num_train_epochs", "adam_epsilon", "lora_alpha"), _POSITIVE),
    **dict.fromkeys(("save_steps", "eval_steps", "logging_steps"), _POSITIVE),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"), _FROM_ZERO),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "lora_dropout", "warmup_ratio"), _SHARE),
    "lmbda": _SHARE,
    "beta": _FROM_ZERO,  # that of preferences is above 0, which the range of dpo.beta says
    "max_steps": _Range("a whole number", -math.inf, is_whole=True),
}


def to_number(key: str, value: Any) -> Any:
    """Return the number that ``value`` spells, if ``key`` takes a number; any other value as it is."""
    if key not in _RANGES or not isinstance(value, str):
        return value
    try:
        parsed = float(value)
    except ValueError:
        return value
    return int(parsed) if math.isfinite(parsed) and parsed == int(parsed) else parsed


def wrong_values(given: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each value that its framework would not accept.

    Args:
        given: Values by the names that the tables use.
        names: The names in the file.
    """
    for key, value in given.items():
        allowed = _RANGES.get(key)
        if allowed is not None and not allowed.accepts(value):
            yield f"{names.get(key, key)}={value}: give {allowed.rule}"
