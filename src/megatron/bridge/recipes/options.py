# SPDX-License-Identifier: Apache-2.0
"""The options of recipes, one ``TypedDict`` per stage, and their defaults. Any other key is refused."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron.bridge.peft.base import PEFT

LowPrecision = Literal[
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
]
Precision = Literal["bf16_mixed", "fp16_mixed", "fp32"] | LowPrecision
Adapter = Literal["lora", "dora", "qlora"]
Module = Literal[
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "vision_model",
]
Recompute = Literal["selective", "full"] | list[Module]


class LayoutOptions(TypedDict, total=False):
    """How the model is distributed over the processes."""

    tensor_model_parallel_size: int
    """Processes that share each weight matrix."""
    sequence_parallel: bool
    """Also shard the activations outside the matrices. On by default if the tensor-parallel size is above 1."""
    pipeline_model_parallel_size: int
    """Processes that share the layers."""
    virtual_pipeline_model_parallel_size: int | None
    """Interleaved stages per process."""
    embedding_and_loss_are_layers: bool
    """Count the embedding and the loss as one layer each when the layers are divided among the stages."""
    pipeline_layout: str | None
    """The layers of each stage, in Megatron-Core's notation (``Et*3|(tt|)*29m|L``). None divides them evenly."""
    context_parallel_size: int
    """Processes that share each sequence."""
    expert_model_parallel_size: int
    """Processes that share the experts of a layer. They are taken from the tensor, context and data dimensions."""
    expert_tensor_parallel_size: int | None
    """Processes that share each weight matrix of an expert.

    None means ``tensor_model_parallel_size``, or 1 where experts have biases.
    """
    recompute: Recompute | None
    """Modules that the backward pass recomputes to save memory: attention (``selective``), all layers (``full``), or
    the listed modules; ``vision_model`` stands for the layers of a vision tower."""


class ScheduleOptions(TypedDict, total=False):
    """Length of training, learning rate, evaluation and saving."""

    seq_length: int
    """Tokens per sample."""
    train_iters: int
    """Optimizer steps."""
    global_batch_size: int
    """Samples per step, over all processes."""
    micro_batch_size: int
    """Samples per forward pass of one process."""
    lr: float
    """Peak learning rate."""
    min_lr: float
    """Final learning rate."""
    warmup_fraction: float
    """Fraction of the steps during which the learning rate increases."""
    eval_interval: int
    """Steps between evaluations."""
    eval_iters: int
    """Global batches per evaluation; 0 turns evaluation off."""
    precision: Precision
    """Precision of the computation."""
    seed: int
    """Seed of weights, dropout and data order."""
    dir: str | None
    """Folder of the run, for checkpoints and logs. None saves nothing."""
    save_interval: int
    """Steps between checkpoints."""
    tokenizer: str | None
    """Directory or hub id. None means the model's tokenizer, or no tokenizer for mock data."""
    hf_model: str | None
    """Directory or hub id of a model to train instead of the recipe's. Its config and tokenizer are used, and for
    fine-tuning its weights; all other settings are the recipe's."""
    hf_path: str | None
    """The name of ``hf_model`` in scripts written for Megatron Bridge."""


class PretrainOptions(LayoutOptions, ScheduleOptions, total=False):
    """Options of ``*_pretrain_config``."""

    data_paths: list[str] | None
    """Corpora written by ``megatron-bridge data preprocess`` (paths without ``.bin``), weighted by their size.
    None trains on mock data."""
    split: str
    """Shares of the documents for training, validation and test."""


class FinetuneOptions(LayoutOptions, ScheduleOptions, total=False):
    """Options of ``*_finetune_config``."""

    pretrained_checkpoint: str | None
    """Weights to start from: a Megatron checkpoint or a Hugging Face directory."""
    dataset_root: str | None
    """Folder with ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl``. With ``eval_iters=0`` the first is
    enough, with ``dataset.do_test=false`` the first two. Or a single file, a folder that `datasets` saved, or a
    dataset on the hub, of which some records are held out for validation. None trains on mock data."""
    peft: "Adapter | PEFT | None"
    """``lora``, ``dora``, ``qlora`` (LoRA on a base in 4 bits) or a ``PEFT`` object trains adapters on frozen weights.
    None trains all weights."""


FP8: PretrainOptions = {"precision": "bf16_with_fp8_current_scaling_mixed"}
FP8_BLOCKWISE: PretrainOptions = {"precision": "bf16_with_fp8_subchannel_scaling_mixed"}
LENGTH_16K: PretrainOptions = {"seq_length": 16384, "global_batch_size": 256}
LENGTH_64K: PretrainOptions = {"seq_length": 65536, "global_batch_size": 64}
LENGTH_128K: PretrainOptions = {"seq_length": 131072, "global_batch_size": 32}
LENGTH_1M: PretrainOptions = {"seq_length": 1048576, "global_batch_size": 8}
MXFP8: PretrainOptions = {"precision": "bf16_with_mxfp8_mixed"}
NVFP4: PretrainOptions = {"precision": "bf16_with_nvfp4_mixed"}


def layout(
    *,
    tp: int = 1,
    pp: int = 1,
    vp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
) -> LayoutOptions:
    """The parallel sizes of a recipe, by their usual abbreviations."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


_LAYOUT_DEFAULTS: LayoutOptions = {
    **layout(),
    "embedding_and_loss_are_layers": False,
    "pipeline_layout": None,
    "recompute": None,
}

_SCHEDULE_DEFAULTS: ScheduleOptions = {
    "micro_batch_size": 1,
    "eval_iters": 10,
    "precision": "bf16_mixed",
    "seed": 1234,
    "dir": None,
    "tokenizer": None,
    "hf_model": None,
}

PRETRAIN_DEFAULTS: PretrainOptions = {
    **_LAYOUT_DEFAULTS,
    **_SCHEDULE_DEFAULTS,
    "train_iters": 250_000,
    "global_batch_size": 512,
    "min_lr": 3e-6,
    "warmup_fraction": 0.01,
    "eval_interval": 1000,
    "save_interval": 1000,
    "data_paths": None,
    "split": "9990,8,2",
}

FINETUNE_DEFAULTS: FinetuneOptions = {
    **_LAYOUT_DEFAULTS,
    **_SCHEDULE_DEFAULTS,
    "seq_length": 4096,
    "train_iters": 1000,
    "global_batch_size": 128,
    "lr": 5e-6,
    "min_lr": 0.0,
    "warmup_fraction": 0.05,
    "eval_interval": 100,
    "save_interval": 100,
    "pretrained_checkpoint": None,
    "dataset_root": None,
    "peft": None,
}

# Adapters start from zero and tolerate a higher rate than pretrained weights. Their rate overrides the recipe's.
ADAPTER_DEFAULTS: FinetuneOptions = {"lr": 1e-4}

# from Zephyr and its recipe with adapters (https://arxiv.org/abs/2310.16944)
DPO_DEFAULTS: FinetuneOptions = {"lr": 5e-7, "warmup_fraction": 0.1, "seq_length": 4096}
DPO_ADAPTER_DEFAULTS: FinetuneOptions = {"lr": 5e-6}

# TRL's learning rate; 16 prompts with 8 completions each
GRPO_DEFAULTS: FinetuneOptions = {
    "lr": 1e-6,
    "warmup_fraction": 0.0,
    "seq_length": 2048,
    "eval_iters": 0,
}
GRPO_ADAPTER_DEFAULTS: FinetuneOptions = {"lr": 1e-5}


def merge_options(kind: type, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options, of which later layers override earlier ones.

    Args:
        kind: The ``TypedDict`` of all options.
        *layers: Values of options, for example defaults, a recipe's and a caller's.

    Raises:
        UserError: a key is of no option of ``kind``, or a model is given twice.
    """
    options: dict[str, Any] = {}
    for layer in layers:
        for key in layer:
            if key not in kind.__annotations__:
                hint = did_you_mean(key, kind.__annotations__)
                raise UserError(f"there is no recipe option {key}{hint}")
        options.update(_rename_hf_path(layer))
    return options


def _rename_hf_path(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``layer`` with ``hf_model`` instead of ``hf_path``."""
    if "hf_path" not in layer:
        return layer
    options = dict(layer)
    hf_path = options.pop("hf_path")
    hf_model = options.get("hf_model")
    if hf_path is None:
        return options
    if hf_model not in (None, hf_path):
        raise UserError(
            f"hf_model={hf_model} and hf_path={hf_path} name the model to train: leave one out"
        )
    options["hf_model"] = hf_path
    return options
