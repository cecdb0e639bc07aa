# SPDX-License-Identifier: Apache-2.0
"""What a recipe can be asked for, one ``TypedDict`` a stage: pyright and the builders refuse any other key."""

from typing import Literal, TypedDict

from megatron.bridge.peft.base import PEFT

LowPrecision = Literal[
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
]
Precision = Literal["bf16_mixed", "fp16_mixed", "fp32"] | LowPrecision
Adapter = Literal["lora", "dora"]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
Recompute = Literal["selective", "full"] | list[Module]


class LayoutOptions(TypedDict, total=False):
    """How the model lies over the processes.

    Attributes:
        tensor_model_parallel_size: Processes that share each matrix.
        sequence_parallel: Share the work between matrices over the same processes, too. Not given: whenever there
            are several.
        pipeline_model_parallel_size: Processes that share the layers.
        virtual_pipeline_model_parallel_size: Interleaved stages of one process.
        embedding_and_loss_are_layers: Count the embedding and the loss as a layer each when layers are shared out.
        pipeline_layout: Which layers each stage holds, in Megatron-Core's letters (``Et*3|(tt|)*29m|L``); None
            shares them out evenly.
        context_parallel_size: Processes that share each sequence.
        expert_model_parallel_size: Processes that share the experts of a layer out among themselves; they are
            taken from the tensor, context and data parallel ones.
        expert_tensor_parallel_size: Processes that share each matrix of an expert; None means as many as share
            the others.
        recompute: What is computed again in the backward pass to save memory: attention only (``selective``),
            whole layers (``full``), or parts of them by name.
    """

    tensor_model_parallel_size: int
    sequence_parallel: bool
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    embedding_and_loss_are_layers: bool
    pipeline_layout: str | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    recompute: Recompute | None


class ScheduleOptions(TypedDict, total=False):
    """How much is trained, how fast, and what is kept of it.

    Attributes:
        seq_length: Tokens of a sample.
        train_iters: Optimizer steps.
        global_batch_size: Samples of one step, over all processes.
        micro_batch_size: Samples of one forward pass of one process.
        lr: Learning rate at its peak.
        min_lr: Learning rate at the end.
        warmup_fraction: Part of the steps over which the learning rate rises.
        eval_interval: Steps between evaluations.
        eval_iters: Global batches of one evaluation; 0 switches evaluation off.
        precision: Number format of the computation.
        seed: Seed of weights, dropout and data order.
        dir: Run folder, for checkpoints and logs; None keeps nothing.
        save_interval: Steps between checkpoints.
        tokenizer: Directory or hub id; None means the model's own with data, and none at all without.
        hf_model: Directory or hub id of a model to train instead of the recipe's: its sizes and its tokenizer, and
            when tuning its weights; everything else stays as the recipe recommends it.
    """

    seq_length: int
    train_iters: int
    global_batch_size: int
    micro_batch_size: int
    lr: float
    min_lr: float
    warmup_fraction: float
    eval_interval: int
    eval_iters: int
    precision: Precision
    seed: int
    dir: str | None
    save_interval: int
    tokenizer: str | None
    hf_model: str | None


class PretrainOptions(LayoutOptions, ScheduleOptions, total=False):
    """Options of ``*_pretrain_config``.

    Attributes:
        data_paths: Corpora written by ``megatron-bridge data preprocess`` (paths without ``.bin``), each taken in
            proportion to its size; None trains on made-up samples.
        split: Shares of the documents for training, validation and test.
    """

    data_paths: list[str] | None
    split: str


class FinetuneOptions(LayoutOptions, ScheduleOptions, total=False):
    """Options of ``*_finetune_config``.

    Attributes:
        pretrained_checkpoint: Weights to start from: a Megatron checkpoint or a Hugging Face directory.
        dataset_root: Folder with ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl``; the last two unless
            ``eval_iters`` is 0, the last also unless ``dataset.do_test`` is false. None trains on made-up samples.
        peft: ``lora`` or ``dora`` trains adapters on frozen weights, as does a method of one's own; None trains
            all weights.
    """

    pretrained_checkpoint: str | None
    dataset_root: str | None
    peft: Adapter | PEFT | None
