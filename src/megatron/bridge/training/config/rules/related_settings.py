# SPDX-License-Identifier: Apache-2.0
"""Rules on settings that exclude or need each other. To add one, add a row to one of the two tables."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.bridge.training.config.rules.conditions import (
    AnyOf,
    Condition,
    Differs,
    Equals,
    Exceeds,
    On,
)
from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig


@dataclass(frozen=True)
class Exclusive:
    """Two settings of which one must be off or unset."""

    first: str
    second: str
    remedy: str


@dataclass(frozen=True)
class Requirement:
    """What a setting cannot do without.

    Attributes:
        when: The setting, or several of which each has these needs.
        needs: Conditions that must all be met.
        remedy: The way out.
    """

    when: Condition
    needs: list[Condition]
    remedy: str


EXCLUSIONS = [
    Exclusive("model.bf16", "model.fp16", remedy="switch one off, or set mixed_precision"),
    Exclusive(
        "model.overlap_p2p_comm", "model.batch_p2p_comm", remedy="set model.batch_p2p_comm=false"
    ),
    # gradients are divided by the number of tokens at the end, so the collective must sum
    Exclusive(
        "model.calculate_per_token_loss",
        "ddp.average_in_collective",
        remedy="switch the second off",
    ),
    Exclusive(
        "model.cpu_offloading", "model.fine_grained_activation_offloading", remedy="switch one off"
    ),
    Exclusive(
        "ddp.bucket_size",
        "ddp.num_buckets",
        remedy="remove one, because both set the size of a bucket",
    ),
    Exclusive("dist.use_torch_fsdp2", "ddp.use_megatron_fsdp", remedy="remove one of them"),
    Exclusive("scheduler.lr_decay_samples", "scheduler.lr_decay_iters", remedy="remove one"),
    Exclusive("scheduler.lr_warmup_samples", "scheduler.lr_warmup_iters", remedy="remove one"),
    Exclusive(
        "scheduler.lr_wsd_decay_samples", "scheduler.lr_wsd_decay_iters", remedy="remove one"
    ),
    Exclusive("scheduler.lr_warmup_fraction", "scheduler.lr_warmup_iters", remedy="remove one"),
    Exclusive("scheduler.lr_warmup_fraction", "scheduler.lr_warmup_samples", remedy="remove one"),
    Exclusive(
        "scheduler.use_checkpoint_opt_param_scheduler",
        "scheduler.override_opt_param_scheduler",
        remedy="switch one off",
    ),
    Exclusive("dpo", "distill", remedy="unset one of them"),
    Exclusive("grpo", "distill", remedy="unset one of them"),
    Exclusive("grpo", "dpo", remedy="unset one of them"),
    # batches are made when a step begins, from what the model writes
    Exclusive("grpo", "train.iterations_to_skip", remedy="unset the second"),
    Exclusive("grpo", "train.rampup_batch_size", remedy="unset the second"),
    Exclusive("grpo", "rerun_state_machine", remedy="unset the second"),
    # generation needs the weights of a rank in whole
    Exclusive("grpo", "dist.use_torch_fsdp2", remedy="use the distributed optimizer"),
    Exclusive("grpo", "ddp.use_megatron_fsdp", remedy="use the distributed optimizer"),
    # completions are sampled with the weights of the optimizer's step, and held-out prompts are no losses of batches
    Exclusive("grpo", "train.skip_train", remedy="evaluate with `megatron-bridge eval` instead"),
    Exclusive("grpo", "validation.sets", remedy="held-out prompts are one set, unset the second"),
    # these losses are no cross entropies of tokens
    Exclusive("distill", "train.label_smoothing", remedy="the teacher's distribution is smooth"),
    Exclusive("dpo", "train.label_smoothing", remedy="use dpo.label_smoothing"),
    Exclusive("grpo", "train.label_smoothing", remedy="unset the second"),
    Exclusive("model.head", "train.label_smoothing", remedy="unset the second"),
    # what they are compared with sees the same embeddings
    Exclusive("distill", "train.neftune_noise_alpha", remedy="unset the second"),
    Exclusive("dpo", "train.neftune_noise_alpha", remedy="unset the second"),
    Exclusive("grpo", "train.neftune_noise_alpha", remedy="unset the second"),
    # such a model has no probabilities of tokens
    Exclusive("model.head", "distill", remedy="a head has no tokens to compare, unset one of them"),
    Exclusive("model.head", "dpo", remedy="a head has no tokens to compare, unset one of them"),
    Exclusive("model.head", "grpo", remedy="a head writes no tokens, unset one of them"),
    Exclusive(
        "distill",
        "model.mtp_num_layers",
        remedy="the teacher gives no logits for MTP layers, unset the second",
    ),
    Exclusive(
        "dpo",
        "model.mtp_num_layers",
        remedy="MTP layers predict tokens, not preferences, unset the second",
    ),
    Exclusive(
        "grpo",
        "model.mtp_num_layers",
        remedy="MTP layers learn from data, not from rewards, unset the second",
    ),
    Exclusive(
        "model.virtual_pipeline_model_parallel_size",
        "distill.hidden_layers",
        remedy="leave the virtual stages out",
    ),
    Exclusive(
        "peft",
        "distill.hidden_layers",
        remedy="an adapter checkpoint cannot hold the trained projection, learn from logits only",
    ),
    *(
        Exclusive(
            "peft.base_precision",
            setting,
            remedy="the frozen weights are not plain tensors, remove one of them",
        )
        for setting in (
            *("dist.use_torch_fsdp2", "ddp.use_megatron_fsdp", "rng.data_parallel_random_init"),
            *("model.fp8", "model.fp4", "model.cpu_offloading", "grpo"),
        )
    ),
    Exclusive(
        "distill.top_k",
        "distill.jsd_beta",
        remedy="other divergences are those of all tokens, unset one of them",
    ),
    Exclusive(
        "distill.cache",
        "distill.on_policy_fraction",
        remedy="a cache has no logits of new answers, run the teacher",
    ),
    Exclusive(
        "distill.cache",
        "distill.hidden_layers",
        remedy="a cache contains no hidden states, unset the second or run the teacher",
    ),
    Exclusive(
        "distill.cache",
        "dataset.padding_free",
        remedy="rows of a cache have equal length, pad or pack them",
    ),
]


REQUIREMENTS = [
    Requirement(
        On("model.sequence_parallel"),
        needs=[Exceeds("model.tensor_model_parallel_size", 1)],
        remedy="raise it, or switch sequence_parallel off",
    ),
    Requirement(
        On("model.virtual_pipeline_model_parallel_size"),
        needs=[Exceeds("model.pipeline_model_parallel_size", 1)],
        remedy="raise that, or leave the virtual size unset",
    ),
    Requirement(
        On("peft"),
        needs=[On("checkpoint.pretrained_checkpoint")],
        remedy="give the weights to put the adapters on, a Megatron checkpoint or a Hugging Face directory",
    ),
    Requirement(
        AnyOf(On("train.skip_train"), On("validation.sets")),
        needs=[On("validation.eval_iters")],
        remedy="set the number of batches of an evaluation",
    ),
    # buffers and graphs have the shape of a microbatch of training
    Requirement(
        On("validation.eval_micro_batch_size"),
        needs=[Equals("model.tp_comm_overlap", False), Equals("model.cuda_graph_impl", "none")],
        remedy="set that, or evaluate with train.micro_batch_size",
    ),
    Requirement(
        Equals("grpo.loss_type", "luspo"),
        needs=[Equals("grpo.importance_sampling_level", "sequence")],
        remedy="set that, or another loss_type",
    ),
    # its default is a distance from 1, and here it is a ratio
    Requirement(
        Equals("grpo.loss_type", "cispo"),
        needs=[Exceeds("grpo.epsilon_high", 0)],
        remedy="set the largest ratio, such as 5.0",
    ),
    Requirement(
        On("grpo.server"),
        needs=[
            Equals("grpo.exact_rollout", False),
            Equals("grpo.router_replay", False),
        ],
        remedy="only this package's engine does that, or unset grpo.server",
    ),
    Requirement(
        AnyOf(*(Equals("grpo.advantage_estimator", name) for name in ("group", "rloo"))),
        needs=[Exceeds("grpo.num_generations", 1)],
        remedy="a completion is compared with others of its prompt, or set grpo.advantage_estimator=gae",
    ),
    Requirement(
        Equals("grpo.advantage_estimator", "gae"),
        needs=[
            Equals("grpo.dynamic_sampling", False),
            # it has no place for a critic
            Equals("checkpoint.non_persistent_ckpt_type", None),
        ],
        remedy="set that, or use another advantage_estimator",
    ),
    # the engine returns log-probabilities of the distribution without temperature
    Requirement(
        On("grpo.importance_sampling_correction"),
        needs=[Equals("grpo.temperature", 1.0)],
        remedy="set that, or switch the correction off",
    ),
    Requirement(
        On("grpo.exact_rollout"),
        needs=[
            Equals("grpo.temperature", 1.0),
            Equals("model.context_parallel_size", 1),
            Equals("model.hidden_dropout", 0.0),
            Equals("model.attention_dropout", 0.0),
            Equals("model.fp8", None),
            # its ratios are exactly 1
            Equals("grpo.importance_sampling_correction", False),
        ],
        remedy="set that, or switch exact_rollout off",
    ),
    # the other texts of a microbatch are what a query is told apart from
    Requirement(
        Equals("model.head", "embedding"),
        needs=[
            AnyOf(
                Exceeds("train.micro_batch_size", 1),
                Exceeds("model.hard_negatives", 0),
                On("model.gather_negatives"),
            ),
            Exceeds("model.contrastive_temperature", 0),
        ],
        remedy="raise them",
    ),
    # Megatron-Core shards only Adam, and would refuse after building the model
    Requirement(
        On("ddp.use_distributed_optimizer"),
        needs=[Equals("optimizer.optimizer", "adam")],
        remedy="set ddp.use_distributed_optimizer=false",
    ),
    Requirement(
        Differs("ddp.num_distributed_optimizer_instances", 1),
        needs=[
            AnyOf(Equals("ddp.use_distributed_optimizer", True), On("dist.use_torch_fsdp2")),
        ],
        remedy="set that, or 1 instance",
    ),
    Requirement(
        Differs("ddp.num_distributed_optimizer_instances", 1),
        needs=[Equals("ddp.reduce_scatter_with_fp32_accumulation", False)],
        remedy="switch that off, or use 1 instance",
    ),
    Requirement(
        Differs("ddp.data_parallel_sharding_strategy", "no_shard"),
        needs=[Equals("ddp.use_megatron_fsdp", True)],
        remedy="set both, or remove the first",
    ),
    Requirement(
        AnyOf(Equals("optimizer.optimizer", "muon"), Equals("optimizer.optimizer", "lion")),
        needs=[Equals("optimizer.fp16", False)],
        remedy="it has no loss scaling, use mixed_precision=bf16_mixed",
    ),
    # layer_wise_optimizer.py of Megatron-Core 0.19.2 prepares the gradients of torch's optimizers for bf16 only
    Requirement(
        On("optimizer.use_layer_wise_distributed_optimizer"),
        needs=[Equals("optimizer.optimizer", "muon"), Equals("model.bf16", True)],
        remedy="or switch it off",
    ),
    # only the distributed optimizer gathers weights, in the order of the reduced buckets
    Requirement(
        On("ddp.overlap_param_gather"),
        needs=[Equals("ddp.use_distributed_optimizer", True)],
        remedy="set both, or switch the overlap off",
    ),
    Requirement(
        On("ddp.overlap_param_gather"),
        needs=[Equals("ddp.overlap_grad_reduce", True)],
        remedy="set both",
    ),
    # the non-interleaved schedule does not support it
    Requirement(
        On("model.overlap_p2p_comm"),
        needs=[Exceeds("model.virtual_pipeline_model_parallel_size", 1)],
        remedy="use virtual pipeline stages, or switch the overlap off",
    ),
    # it hides the gather and scatter of sequence parallelism
    Requirement(
        On("model.tp_comm_overlap"),
        needs=[Equals("model.sequence_parallel", True)],
        remedy="set that with tensor parallelism, or switch the overlap off",
    ),
    Requirement(
        On("model.delay_wgrad_compute"),
        needs=[Equals("model.overlap_moe_expert_parallel_comm", True)],
        remedy="set both, or switch the first off",
    ),
    # only a pipeline drains, and only fused gradient accumulation can be deferred
    Requirement(
        On("model.defer_embedding_wgrad_compute"),
        needs=[Exceeds("model.pipeline_model_parallel_size", 1)],
        remedy="use more stages, or switch it off",
    ),
    Requirement(
        On("model.defer_embedding_wgrad_compute"),
        needs=[Equals("model.gradient_accumulation_fusion", True)],
        remedy="that takes a GPU and Apex, switch the first off",
    ),
    Requirement(
        On("model.fine_grained_activation_offloading"),
        needs=[On("model.offload_modules")],
        remedy="say what, for example core_attn",
    ),
    # two microbatches are interleaved layer by layer, in half precision
    Requirement(
        On("model.overlap_moe_expert_parallel_comm"),
        needs=[
            Exceeds("model.expert_model_parallel_size", 1),
            AnyOf(
                Equals("model.moe_token_dispatcher_type", "alltoall"),
                Equals("model.moe_token_dispatcher_type", "flex"),
            ),
            AnyOf(On("model.bf16"), On("model.fp16")),
            AnyOf(
                Equals("model.pipeline_model_parallel_size", 1),
                Exceeds("model.virtual_pipeline_model_parallel_size", 1),
            ),
            Differs("model.recompute_granularity", "full"),
            Equals("model.moe_shared_expert_overlap", False),
            AnyOf(
                Equals("model.mtp_num_layers", None),
                Equals("model.mtp_num_layers", 0),
                Equals("model.mtp_num_layers", 1),
            ),
        ],
        remedy="or switch it off",
    ),
    # Megatron-Core offloads shards of Adam's state; other optimizers would update copies that nobody reads
    Requirement(
        On("optimizer.optimizer_cpu_offload"),
        needs=[
            Equals("optimizer.optimizer", "adam"),
            Equals("optimizer.decoupled_weight_decay", True),
            Equals("ddp.use_distributed_optimizer", True),
            Exceeds("optimizer.optimizer_offload_fraction", 0),
        ],
        remedy="or switch it off",
    ),
    Requirement(
        On("optimizer.use_precision_aware_optimizer"),
        needs=[
            Equals("optimizer.optimizer", "adam"),
            Equals("ddp.use_distributed_optimizer", True),
            Equals("optimizer.main_params_dtype", torch.float32),
        ],
        remedy="or switch it off",
    ),
    # projections to a teacher's width are used outside of the forward pass, where weights are sharded; the other
    # features that are refused are untested
    Requirement(
        AnyOf(On("dist.use_torch_fsdp2"), On("ddp.use_megatron_fsdp")),
        needs=[
            Equals("model.fp16", False),
            Equals("model.fp8", None),
            Equals("model.fp4", None),
            Equals("model.gradient_accumulation_fusion", False),
            Equals("model.cpu_offloading", False),
            Equals("optimizer.optimizer_cpu_offload", False),
            Equals("optimizer.use_precision_aware_optimizer", False),
            AnyOf(Equals("distill", None), Equals("distill.hidden_layers", {})),
            Equals("rng.data_parallel_random_init", False),
            AnyOf(Equals("inprocess_restart", None), Equals("inprocess_restart.enabled", False)),
        ],
        remedy="use ddp.use_distributed_optimizer=true instead",
    ),
    # it scales whole weights of queries and keys, which nothing may normalize afterwards, and needs all scores
    Requirement(
        On("model.qk_clip"),
        needs=[
            Equals("ddp.use_distributed_optimizer", False),
            Equals("ddp.use_megatron_fsdp", False),
            Equals("dist.use_torch_fsdp2", False),
            Equals("model.attention_output_gate", False),
            Equals("model.attention_k_eq_v", False),
            Equals("model.shared_kv_layers", None),
            AnyOf(
                Equals("model.qk_layernorm", False), Equals("model.multi_latent_attention", True)
            ),
            Equals("peft", None),
            Differs("model.experimental_attention_variant", "dsa"),
            AnyOf(
                Equals("model.context_parallel_size", 1),
                Equals("model.cp_comm_type", None),
                Equals("model.cp_comm_type", "all_gather"),
            ),
        ],
        remedy="or switch it off",
    ),
    # random samplers and readers distribute samples by whole global batches
    Requirement(
        On("train.rampup_batch_size"),
        needs=[
            AnyOf(
                Equals("dataset.dataloader_type", "single"),
                Equals("dataset.dataloader_type", "cyclic"),
            )
        ],
        remedy="set one of them",
    ),
    Requirement(
        AnyOf(On("validation.patience"), On("checkpoint.keep_best")),
        needs=[On("validation.eval_interval"), On("validation.eval_iters")],
        remedy="to evaluate during the run",
    ),
    Requirement(
        On("checkpoint.keep_best"),
        needs=[On("checkpoint.save")],
        remedy="so that there are checkpoints to keep",
    ),
    Requirement(
        On("checkpoint.non_persistent_ckpt_type"),
        needs=[On("checkpoint.non_persistent_save_interval")],
        remedy="set both or none of them",
    ),
    Requirement(
        On("checkpoint.non_persistent_save_interval"),
        needs=[On("checkpoint.non_persistent_ckpt_type")],
        remedy="set both or none of them",
    ),
    Requirement(
        On("checkpoint.non_persistent_ckpt_type"),
        needs=[On("checkpoint.save")],
        remedy="give a run folder",
    ),
    Requirement(
        Equals("checkpoint.non_persistent_ckpt_type", "local"),
        needs=[On("checkpoint.non_persistent_local_ckpt_dir")],
        remedy="give a folder on a local disk of every machine",
    ),
    # what is in memory is lost when the process restarts
    Requirement(
        Equals("checkpoint.non_persistent_ckpt_type", "in_memory"),
        needs=[On("inprocess_restart")],
        remedy="set that, or use local with a folder in memory such as /dev/shm",
    ),
    Requirement(
        On("checkpoint.also_save_hf_checkpoint"),
        needs=[On("checkpoint.save")],
        remedy="give a run folder, or set also_save_hf_checkpoint to False",
    ),
    Requirement(
        On("checkpoint.also_save_hf_checkpoint"),
        needs=[Equals("peft", None)],
        remedy=(
            "checkpoints hold the adapters alone, set also_save_hf_checkpoint to False and export with "
            "megatron-bridge adapter"
        ),
    ),
    Requirement(
        On("model.qat"),
        needs=[Equals("peft", None)],
        remedy="leave one out; peft.base_precision trains adapters over a base in low precision",
    ),
    # its engine generates with the layers that train, and packs their weights
    Requirement(
        On("model.qat"),
        needs=[Equals("grpo", None)],
        remedy="leave it out, train with it before or after",
    ),
    Requirement(
        On("nvrx_straggler"),
        needs=[
            AnyOf(
                On("nvrx_straggler.calc_relative_gpu_perf"),
                On("nvrx_straggler.calc_individual_gpu_perf"),
            )
        ],
        remedy="set one of them, or nothing is compared",
    ),
    Requirement(
        On("profiling.use_pytorch_profiler"),
        needs=[On("logger.log_dir")],
        remedy="give logger.log_dir or checkpoint.save",
    ),
    Requirement(
        On("profiling.record_memory_history"),
        needs=[On("logger.log_dir")],
        remedy="give logger.log_dir or checkpoint.save",
    ),
    Requirement(
        On("distill"),
        needs=[AnyOf(On("distill.teacher"), On("distill.cache"))],
        remedy="give a Hugging Face directory, a hub id or a Megatron checkpoint",
    ),
    Requirement(
        On("distill"),
        needs=[AnyOf(On("distill.kl_weight"), On("distill.hidden_weight"))],
        remedy="with both 0 nothing is learned, raise one of them",
    ),
    Requirement(
        On("distill.hidden_layers"), needs=[On("distill.hidden_weight")], remedy="set both, or none"
    ),
    Requirement(
        On("distill.hidden_weight"), needs=[On("distill.hidden_layers")], remedy="set both, or none"
    ),
    Requirement(
        On("distill.hidden_layers"),
        needs=[Differs("model.recompute_granularity", "full")],
        remedy="hidden states of recomputed layers have no gradient, use selective",
    ),
    # a cache holds only the most likely tokens
    Requirement(
        On("distill.cache"),
        needs=[On("distill.top_k")],
        remedy="set distill.top_k to the cache's value",
    ),
]


def settings_do_not_exclude_each_other(config: RunConfig, world_size: int) -> Iterator[str]:
    """Of some pairs of settings, such as ``model.bf16`` and ``model.fp16``, at most one may be set."""
    for row in EXCLUSIONS:
        first_value = value_of(config, row.first)
        # a fraction or a number of samples counts as given even if it is 0
        is_first_given = first_value is not None and first_value is not False
        if is_first_given and value_of(config, row.second):
            first = _shown(config, row.first)
            second = _shown(config, row.second)
            yield f"{first} and {second} exclude each other: {row.remedy}"


def settings_have_what_they_need(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features build on others, such as the distributed optimizer, which must be on, too."""
    for row in REQUIREMENTS:
        missing = "; ".join(str(need) for need in row.needs if not need.is_met(config))
        if not missing:
            continue
        for condition in row.when.alternatives:
            if condition.is_met(config):
                yield f"{_shown(config, condition.key)} needs {missing}: {row.remedy}"


def _shown(config: RunConfig, key: str) -> str:
    value = value_of(config, key)
    return key if dataclasses.is_dataclass(value) else f"{key}={value}"
