# SPDX-License-Identifier: Apache-2.0
"""Each rule refuses what it is for, in a sentence with the key, the value and the way out."""

import re
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.data.config import (
    ClassificationDatasetConfig,
    FinetuningDatasetConfig,
    GPTDatasetConfig,
    PackedSequenceSpecs,
    PreferenceDatasetConfig,
    PromptDatasetConfig,
    SFTDatasetConfig,
)
from megatron.bridge.data.energon import EnergonProvider
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.models.vision.provider import VisionGPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import (
    CommOverlapConfig,
    DistillConfig,
    DPOConfig,
    FaultToleranceConfig,
    GRPOConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    ParameterOverride,
    ProfilingConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
    ValidationConfig,
    rules,
)
from megatron.bridge.training.config.blocks.reinforcement import CriticConfig
from megatron.bridge.training.config.ranges import all_ranges
from megatron.bridge.training.config.resolve import resolve
from megatron.bridge.training.config.resolve.findings import Hardware
from megatron.bridge.training.config.rules import fields as rule_fields
from megatron.bridge.training.config.rules import idle_settings, related_settings
from megatron.bridge.training.config.rules.conditions import Equals, Exceeds, On
from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

TP, PP, VP, CP, EP, ETP = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.expert_tensor_parallel_size",
)


def packed(**specs):
    return FinetuningDatasetConfig(
        seq_length=32,
        dataset_root=".",
        packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=32, **specs),
    )


PAIRS = PreferenceDatasetConfig(seq_length=32, dataset_root=".", labeled=False)
CLASSES = ClassificationDatasetConfig(seq_length=32, dataset_root=".")
VISION = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "seq_length": 32,
}

# rule: (what is set, number of processes, what the sentence says)
CASES = {
    "settings_have_what_they_need": (
        {
            "model.sequence_parallel": True,
            "checkpoint.also_save_hf_checkpoint": True,
            "peft": LoRA(),
        },
        1,
        [
            f"model.sequence_parallel=True needs {TP} > 1: raise it",
            "checkpoint.also_save_hf_checkpoint=True needs checkpoint.save: give",
            "also_save_hf_checkpoint=True needs peft=None: checkpoints hold the adapters alone",
        ],
    ),
    "non_persistent_saves_lie_between": (
        {
            "checkpoint.save": "run",
            "checkpoint.save_interval": 2,
            "checkpoint.non_persistent_ckpt_type": "global",
            "checkpoint.non_persistent_save_interval": 4,
        },
        1,
        ["non_persistent_save_interval=4 has no effect", "save_interval=2", "make it shorter"],
    ),
    "expert_overlap_keeps_experts": (
        {
            "model.overlap_moe_expert_parallel_comm": True,
            "model.recompute_granularity": "selective",
            "model.recompute_modules": ["moe"],
        },
        1,
        ["overlap_moe_expert_parallel_comm=True needs model.recompute_modules without moe"],
    ),
    "offloaded_layers_exist": (
        {"model.cpu_offloading": True, "model.cpu_offloading_num_layers": 4},
        1,
        ["cpu_offloading_num_layers=4", "between 1 and 3"],
    ),
    "offloading_fits_backend": (
        {
            "model.cpu_offloading": True,
            "model.cpu_offloading_num_layers": 1,
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        },
        1,
        ["model.cpu_offloading=True", "model.recompute_granularity=full", "selective"],
    ),
    "delayed_wgrad_is_set_for_both": (
        {"model.delay_wgrad_compute": True},
        1,
        ["model.delay_wgrad_compute=True and ddp.delay_wgrad_compute=False must agree"],
    ),
    "distill_settings_are_valid": (
        {"distill": DistillConfig(teacher="x", top_k=96, hidden_weight=1.0, hidden_layers={5: 1})},
        1,
        ["distill.top_k=96: must lie between 1 and the vocabulary of 96", "layers 1 to 4, not 5"],
    ),
    "epochs_can_be_counted": (
        {"train.num_epochs": 2.0, "train.train_samples": 8},
        1,
        [
            "train.num_epochs=2",
            "train.train_samples=8",
            "MockGPTDatasetConfig",
            "train.train_iters",
        ],
    ),
    "numbers_are_finite": (
        {"optimizer.lr": float("inf"), "model.layernorm_epsilon": float("nan")},
        1,
        ["optimizer.lr=inf", "model.layernorm_epsilon=nan", "must be a finite number"],
    ),
    "numbers_are_in_range": (
        {"optimizer.clip_grad": -1.0, "train.iterations_to_skip": [2, 0]},
        1,
        ["clip_grad=-1.0: must be at least 0", "iterations_to_skip=[2, 0]: must be at least 1"],
    ),
    "sizes_are_in_range": (
        {
            "model.kv_channels": 0,
            "model.rotary_base": -10,
            "model.rotary_percent": 2.0,
            "rng.seed": 10**20,
        },
        1,
        [
            "kv_channels=0: must be at least 1",
            "rotary_base=-10: must be above 0",
            "at least 0 and at most 1",
            "rng.seed=",
        ],
    ),
    "sizes_are_positive": (
        {TP: 0, "train.train_iters": 0},
        1,
        [f"{TP}=0", "train.train_iters=0", "at least 1"],
    ),
    "world_size_fits_layout": (
        {TP: 2, PP: 2},
        6,
        [f"{TP}=2", "needs 4 processes", "there are 6", "start 4 or 8"],
    ),
    "attributes_are_fields": (
        {"train.train_itres": 5},
        1,
        ["train.train_itres is not a field of TrainingConfig", "train_iters"],
    ),
    "literals_are_known": (
        {"checkpoint.when_damaged": "refues", "dist.distributed_backend": "glo"},
        1,
        [
            "checkpoint.when_damaged=refues: use one of use_previous, refuse",
            "dist.distributed_backend=glo",
        ],
    ),
    "nvrx_straggler_needs_a_gpu": (
        {"nvrx_straggler": NVRxStragglerDetectionConfig()},
        1,
        ["nvrx_straggler needs a GPU", "use straggler"],
    ),
    "profiling_has_tool_steps_and_ranks": (
        {
            "profiling": ProfilingConfig(use_pytorch_profiler=True, profile_ranks=[0, 5]),
            "train.train_iters": 20,
        },
        2,
        ["profile_ranks=[0, 5]", "0 to 1", "leave 5 out"],
    ),
    "one_gpu_profiler_at_a_time": (
        {"profiling": ProfilingConfig(use_pytorch_profiler=True, use_nsys_profiler=True)},
        1,
        ["profiling.use_pytorch_profiler and profiling.use_nsys_profiler", "leave all but one out"],
    ),
    "gpu_metrics_need_a_gpu": (
        {"logger.log_energy": True},
        1,
        ["logger.log_energy=True needs a GPU"],
    ),
    "inprocess_restart_timeouts_are_ordered": (
        {"inprocess_restart": InProcessRestartConfig(soft_timeout=100)},
        1,
        ["soft_timeout=100, hard_timeout=90", "must grow"],
    ),
    "simulated_fault_rank_exists": (
        {"ft": FaultToleranceConfig(simulated_fault_rank=2)},
        2,
        ["ft.simulated_fault_rank=2", "between 0 and 1"],
    ),
    "labeled_answers_go_with_kto": (
        {
            "dpo": DPOConfig(loss_type="kto", rpo_alpha=0.5),
            "dataset": PAIRS,
            "train.micro_batch_size": 1,
        },
        1,
        [
            "dpo.rpo_alpha=0.5",
            "dataset.labeled=False",
            "dpo.loss_type sigmoid, ipo, hinge, cpo, simpo or orpo",
            "train.micro_batch_size=1",
            "2 or more",
        ],
    ),
    "preference_data_goes_with_dpo": (
        {"dpo": DPOConfig()},
        1,
        ["dataset is a MockGPTDatasetConfig", "PreferenceDatasetConfig"],
    ),
    "prompts_go_with_grpo": (
        {"grpo": GRPOConfig()},
        1,
        ["dataset is a MockGPTDatasetConfig", "PromptDatasetConfig"],
    ),
    "completions_make_whole_groups": (
        {
            "grpo": GRPOConfig(num_generations=3, max_completion_length=32),
            "dataset": PromptDatasetConfig(seq_length=32, dataset_root="."),
        },
        1,
        [
            "train.global_batch_size=8",
            "grpo.num_generations=3",
            "for example to 9 completions",
            "grpo.max_completion_length=32",
            "dataset.seq_length=32",
        ],
    ),
    "adapters_can_have_the_engines_numbers": (
        {"grpo": GRPOConfig(exact_rollout=True), "peft": LoRA(dropout=0.1)},
        1,
        ["grpo.exact_rollout=True", "peft.dropout=0.1", "set peft.dropout=0"],
    ),
    "experts_can_be_replayed": (
        {
            "grpo": GRPOConfig(router_replay=True),
            "model.num_moe_experts": 4,
            "model.moe_router_fusion": True,
        },
        1,
        ["grpo.router_replay=True", "moe_router_fusion=True", "set model.moe_router_fusion=False"],
    ),
    "head_fits_the_data": (
        {"model.head": "sequence_classification", "model.num_labels": 1, "dataset": CLASSES},
        1,
        ["num_labels=1", "RewardDatasetConfig", "dataset is a ClassificationDatasetConfig"],
    ),
    "adapters_leave_a_new_head_untrained": (
        {
            "model.head": "sequence_classification",
            "model.num_labels": 2,
            "peft": LoRA(),
            "dataset": CLASSES,
        },
        1,
        ["model.head=sequence_classification", "modules_to_save=[]", "add output_layer"],
    ),
    "adapters_can_be_switched_off": (
        {"dpo": DPOConfig(), "peft": LoRA(modules_to_save=["embedding"])},
        1,
        ["dpo.reference is not set", "peft.modules_to_save"],
    ),
    "images_need_a_vision_tower": (
        {
            "dataset": FinetuningDatasetConfig(
                seq_length=32, dataset_root=".", hf_processor_path="hf"
            )
        },
        1,
        ["dataset.hf_processor_path=hf", "no vision tower"],
    ),
    "sent_outputs_can_be_freed": (
        {"model": VisionGPTModelProvider(**VISION, deallocate_pipeline_outputs=True), PP: 2},
        2,
        ["model.deallocate_pipeline_outputs=True", "set it to False"],
    ),
    "hybrid_pattern_is_valid": (
        {
            "model": MambaModelProvider(
                num_layers=2, hidden_size=32, num_attention_heads=4, hybrid_override_pattern="MQ"
            )
        },
        1,
        ["model.hybrid_override_pattern=MQ has 'Q'", "M Mamba, * attention"],
    ),
    "peft_settings_are_valid": ({"peft": LoRA(dim=0)}, 1, ["peft.dim=0: a rank is at least 1"]),
    "groups_divide_heads": ({"model.num_query_groups": 3}, 1, ["num_query_groups=3", "use 2 or 4"]),
    "tp_divides_heads": ({TP: 8}, 8, [f"{TP}=8", "num_attention_heads=4", "use 4"]),
    "tp_fits_query_groups": (
        {
            TP: 4,
            "model.num_attention_heads": 12,
            "model.num_query_groups": 6,
            "model.hidden_size": 48,
        },
        4,
        [f"{TP}=4", "num_query_groups=6", "use 3 or 6"],
    ),
    "tp_divides_ffn": (
        {TP: 4, "model.ffn_hidden_size": 90},
        4,
        ["ffn_hidden_size=90", "use 3 or 5"],
    ),
    "tp_divides_vocabulary": (
        {TP: 2, "model.vocab_size": 97},
        2,
        ["vocabulary of 97", "should_pad_vocab=true"],
    ),
    "sp_divides_sequence": (
        {"model.sequence_parallel": True, TP: 2, "dataset.seq_length": 31},
        2,
        ["dataset.seq_length=31", "use 30 or 32"],
    ),
    "pp_divides_layers": ({PP: 3}, 3, [f"{PP}=3", "num_layers=4", "use 2 or 4"]),
    "stage_sizes_are_given_once": (
        {
            PP: 2,
            "model.pipeline_model_parallel_layout": "Ett|ttL",
            "model.num_layers_in_first_pipeline_stage": 2,
        },
        2,
        ["num_layers_in_first_pipeline_stage=2", "layout=Ett|ttL", "keep one"],
    ),
    "middle_stages_are_even": (
        {PP: 2, "model.num_layers_in_first_pipeline_stage": 5},
        2,
        ["num_layers_in_first_pipeline_stage=5", "leaves -1 layers"],
    ),
    "accounted_layers_divide_stages": (
        {PP: 2, "model.account_for_loss_in_pipeline_split": True},
        2,
        ["account_for_loss_in_pipeline_split=True", "makes 5", "use 3 or 5 layers"],
    ),
    "pipeline_layout_has_every_layer": (
        {PP: 2, "model.pipeline_model_parallel_layout": "Ett|tL"},
        2,
        ["layout=Ett|tL", "4 layers (t)"],
    ),
    "vp_fits_microbatches": (
        {VP: 2, PP: 2, "train.global_batch_size": 6},
        2,
        ["global_batch_size=6", "3 microbatches", "use 2 or 4 microbatches"],
    ),
    "cp_divides_sequence": (
        {CP: 2, "dataset.seq_length": 30},
        2,
        ["seq_length=30", "use 28 or 32"],
    ),
    "cp_a2a_divides_heads": (
        {CP: 4, TP: 2, "model.cp_comm_type": "a2a"},
        8,
        ["cp_comm_type=a2a", "2 query and 1 key heads", "all_gather"],
    ),
    "cp_comm_type_is_available": (
        {
            CP: 2,
            "model.cp_comm_type": ["p2p", "ring", "p2p", "a2a"],
            "model.attention_dropout": 0.1,
            "model.backend": "torch",
        },
        2,
        [
            "cp_comm_type=ring: use one of all_gather, a2a, p2p, a2a+p2p",
            "cp_comm_type=p2p with model.attention_dropout=0.1",
            "cp_comm_type=all_gather",
        ],
    ),
    "ep_divides_experts": (
        {EP: 4, "model.num_moe_experts": 6},
        4,
        [f"{EP}=4", "num_moe_experts=6", "use 3 or 6"],
    ),
    "tp_with_experts_needs_sp": (
        {TP: 2, "model.num_moe_experts": 4},
        2,
        ["sequence_parallel=true"],
    ),
    "expert_ranks_fill_the_world": (
        {EP: 4, "model.num_moe_experts": 8},
        2,
        [f"{EP}=4", "needs 4 processes", "there are 2", "start 4"],
    ),
    "expert_tensor_ranks_divide_experts": (
        {ETP: 4, "model.num_moe_experts": 4, "model.moe_ffn_hidden_size": 90},
        4,
        [f"{ETP}=4", "moe_ffn_hidden_size=90", "use 3 or 5"],
    ),
    "tp_divides_shared_experts": (
        {
            TP: 4,
            ETP: 1,
            "model.sequence_parallel": True,
            "model.num_moe_experts": 4,
            "model.moe_shared_expert_intermediate_size": 90,
        },
        4,
        [f"{TP}=4", "moe_shared_expert_intermediate_size=90", "use 3 or 5"],
    ),
    "topk_fits_num_experts": (
        {"model.num_moe_experts": 4, "model.moe_router_topk": 6},
        1,
        ["moe_router_topk=6", "num_moe_experts=4"],
    ),
    "expert_groups_are_even": (
        {
            "model.num_moe_experts": 8,
            "model.moe_router_num_groups": 3,
            "model.moe_router_group_topk": 1,
        },
        1,
        ["moe_router_num_groups=3", "num_moe_experts=8", "use 2 or 4"],
    ),
    "layer_features_fit": (
        {
            "model.num_moe_experts": 4,
            "model.moe_latent_size": 16,
            "model.moe_shared_expert_overlap": True,
        },
        1,
        ["moe_shared_expert_overlap=True", "moe_latent_size=16", "set it to false"],
    ),
    "layer_spec_fits_moe_layer_freq": (
        {
            "model.num_moe_experts": 4,
            "model.moe_layer_freq": [0, 1, 1, 1],
            "model.transformer_layer_spec": ModuleSpec(module=object),
        },
        1,
        ["moe_layer_freq=[0, 1, 1, 1]", "one spec for all layers"],
    ),
    "heads_divide_width": (
        {"model.hidden_size": 30},
        1,
        ["num_attention_heads=4", "hidden_size=30", "use 3 or 5"],
    ),
    "rotary_width_is_even": (
        {"model.kv_channels": 7, "model.position_embedding_type": "rope"},
        1,
        ["kv_channels=7", "rotary_percent=1.0", "rotate 7 dimensions", "use model.kv_channels=8"],
    ),
    "exact_gelu_is_not_fused": (
        {"model.bias_activation_fusion": True, "model.activation_func": F.gelu},
        1,
        ["bias_activation_fusion=True", "tanh approximation", "bias_activation_fusion=false"],
    ),
    "optimizer_is_known": (
        {"optimizer.optimizer": "adamw"},
        1,
        ["optimizer.optimizer=adamw", "use adam (it is AdamW"],
    ),
    "qk_clip_has_whole_groups": (
        {"model.qk_clip": True, TP: 4},
        4,
        [f"model.qk_clip=True with {TP}=4", "num_query_groups=2", "use a divisor"],
    ),
    "muon_fits_tensor_parallelism": (
        {"optimizer.optimizer": "muon", "optimizer.muon_tp_mode": "blocks"},
        1,
        ["muon_tp_mode=blocks", "duplicated, distributed, blockwise"],
    ),
    "rampup_reaches_global_batch_size": (
        {"train.rampup_batch_size": [2, 4, 100]},
        1,
        ["rampup_batch_size=[2, 4, 100]", "global_batch_size=8", "use an increment of 3 or 6"],
    ),
    "rampup_fits_data_parallel_size": (
        {"train.rampup_batch_size": [2, 2, 100]},
        2,
        ["a step of 2 samples", "micro_batch_size=2 x data parallel size 2", "use 4"],
    ),
    "rampup_fits_virtual_stages": (
        {"train.rampup_batch_size": [2, 6, 100], PP: 2, VP: 2},
        2,
        ["steps of 1 microbatches", "groups of 2", "multiples of 4"],
    ),
    "cuda_graphs_fit": (
        {
            "model.cuda_graph_impl": "full_iteration",
            "model.mtp_num_layers": 1,
            "logger.timing_log_level": 1,
        },
        1,
        ["model.cuda_graph_impl=full_iteration needs", "mtp_num_layers=null", "timing_log_level=0"],
    ),
    "deterministic_delta_nets_are_unpacked": (
        {
            "model.deterministic_mode": True,
            "model.experimental_attention_variant": "gated_delta_net",
            "dataset": packed(),
        },
        1,
        ["deterministic_mode=True with gated delta nets and packed samples", "unpack"],
    ),
    "optimizer_settings_are_used": (
        {"optimizer.sgd_momentum": 0.5},
        1,
        ["optimizer.sgd_momentum=0.5 has no effect with optimizer.optimizer=adam"],
    ),
    "overrides_are_valid": (
        {"optimizer.overrides": [ParameterOverride(["embedding.*"])]},
        1,
        ["optimizer.overrides for embedding.* sets nothing"],
    ),
    "overrides_are_ordered": (
        {
            "optimizer.overrides": [ParameterOverride(["embedding.*"], lr=1e-4)],
            "optimizer.min_lr": 1e-3,
        },
        1,
        ["optimizer.overrides for embedding.*", "peak of 0.0001 and an end of 0.001"],
    ),
    "optimizer_instances_divide_replicas": (
        {"ddp.num_distributed_optimizer_instances": 3, "model.num_moe_experts": 4, EP: 2},
        4,
        [
            "num_distributed_optimizer_instances=3",
            "4 ranks that share",
            "use 2 or 4",
            "2 ranks that hold the same",
        ],
    ),
    "settings_do_not_exclude_each_other": (
        {
            "scheduler.lr_warmup_samples": 8,
            "scheduler.lr_warmup_iters": 1,
            "model.overlap_p2p_comm": True,
        },
        1,
        [
            "scheduler.lr_warmup_samples=8 and scheduler.lr_warmup_iters=1 exclude each other: remove one",
            "model.overlap_p2p_comm=True and model.batch_p2p_comm=True exclude each other: set",
        ],
    ),
    "unavailable_settings_are_unset": (
        {"tensor_inspect": 1, "model.moe_per_layer_logging": True},
        1,
        ["tensor_inspect=1: not available", "model.moe_per_layer_logging=True: not available"],
    ),
    "shared_samples_fit_the_ranks": (
        {
            "model.hybrid_context_parallel": True,
            "model.max_seqlen_per_dp_cp_rank": 5,
            "dataset": packed(),
        },
        3,
        [
            "hybrid_context_parallel=True with data parallel size 3",
            "a power of two",
            "model.max_seqlen_per_dp_cp_rank=5 must be a multiple of 2",
            "use 4 or 6",
            "max_seqlen_per_dp_cp_rank=5 on 3 data-parallel ranks holds 15 tokens",
            "less than dataset.seq_length=32",
        ],
    ),
    "sharing_samples_has_what_it_needs": (
        {
            "model.hybrid_context_parallel": True,
            "model.max_seqlen_per_dp_cp_rank": 16,
            "model.mtp_num_layers": 1,
            "model.num_moe_experts": 2,
            "model.moe_aux_loss_coeff": 0.01,
            "model.cp_comm_type": "a2a",
        },
        2,
        [
            "records in packed rows (dataset.packed_sequence_specs)",
            "train.micro_batch_size=1",
            "model.cp_comm_type=all_gather or p2p",
            "attention in all layers (no Mamba, linear or sparse attention, no mtp_num_layers)",
            "routers without losses (moe_aux_loss_coeff=0",
            "or switch it off",
        ],
    ),
    "hierarchical_cp_has_two_levels": (
        {"model.hierarchical_context_parallel_sizes": [3, 2], CP: 4},
        4,
        [
            "sizes=[3, 2]",
            "cp_comm_type=a2a+p2p",
            "product is model.context_parallel_size=4",
            "divides the 2 key heads",
        ],
    ),
    "precise_optimizer_is_stored": (
        {
            "optimizer.use_precision_aware_optimizer": True,
            "optimizer.exp_avg_dtype": torch.float16,
            "optimizer.main_params_dtype": torch.float16,
        },
        1,
        ["exp_avg_dtype=float32 or bfloat16"],
    ),
    "replicas_divide_batch": (
        {"train.global_batch_size": 10},
        4,
        ["global_batch_size=10", "use 8 or 16"],
    ),
    "validation_sets_can_be_read": (
        {"validation.sets": {"a/b": None, "other": "data/text"}},
        1,
        ["validation.sets: a/b", "without a slash", "other", "data/text", "give a number"],
    ),
    "sequence_fits_model": (
        {"dataset.seq_length": 64},
        1,
        ["seq_length=64", "model.seq_length=32"],
    ),
    "learning_rates_are_ordered": ({"optimizer.lr": None}, 1, ["optimizer.lr=None", "above 0"]),
    "warmup_ends_before_decay": (
        {"scheduler.lr_warmup_iters": 10, "scheduler.lr_decay_iters": 10},
        1,
        ["lr_warmup_iters=10", "lr_decay_iters=10", "at most 9"],
    ),
    "learning_rate_lasts": (
        {"scheduler.lr_decay_iters": 1},
        1,
        ["lr_decay_iters=1", "learning rate of 0", "lr_decay_iters=null", "min_lr"],
    ),
    "wsd_has_a_decay": (
        {"scheduler.lr_decay_style": "WSD"},
        1,
        ["lr_wsd_decay_iters=None", "between 1 and 8"],
    ),
    "weight_decay_grows": (
        {"scheduler.start_weight_decay": 0.2, "scheduler.end_weight_decay": 0.1},
        1,
        ["start_weight_decay=0.2", "end_weight_decay=0.1"],
    ),
    "cp_with_masks_needs_per_token_loss": (
        {
            CP: 2,
            "model.calculate_per_token_loss": False,
            "dataset": GPTDatasetConfig(
                seq_length=32, blend=(["a"], None), split="1", eod_mask_loss=True
            ),
        },
        2,
        ["context_parallel_size=2", "calculate_per_token_loss=True"],
    ),
    "fsdp2_ignores_ddp_settings": (
        {
            "dist.use_torch_fsdp2": True,
            "ddp.overlap_grad_reduce": True,
            "ddp.use_distributed_optimizer": True,
        },
        2,
        [
            "ddp.overlap_grad_reduce=True has no effect",
            "ddp.use_distributed_optimizer=True has no effect",
        ],
    ),
    "megatron_fsdp_settings_are_supported": (
        {
            "ddp.use_megatron_fsdp": True,
            "ddp.data_parallel_sharding_strategy": "no_shard",
            "ddp.average_in_collective": True,
            "optimizer.log_num_zeros_in_grad": True,
            "model.share_embeddings_and_output_weights": True,
            PP: 2,
        },
        2,
        [
            f"{PP}=2 must be 1 with tied embeddings",
            "ddp.use_megatron_fsdp=True: ddp.average_in_collective=True must be False",
            "strategy=no_shard must be optim or optim_grads or optim_grads_params",
            "log_num_zeros_in_grad must be false",
            "use_distributed_optimizer=true",
        ],
    ),
    "packed_samples_need_micro_batch_of_one": (
        {"dataset": packed(), "train.micro_batch_size": 2},
        1,
        ["train.micro_batch_size=2", "set train.micro_batch_size=1"],
    ),
    "packed_samples_fit_context_parallel": (
        {CP: 2, "train.micro_batch_size": 1, "dataset": packed(pad_seq_to_mult=2)},
        2,
        ["pad_seq_to_mult=2", "no multiple of 4"],
    ),
    "packages_are_installed": (
        {
            "logger.wandb_project": "toys",
            "checkpoint.save": "run",
            "checkpoint.async_save": True,
            "checkpoint.async_strategy": "nvrx",
        },
        1,
        [
            "logger.wandb_project=toys needs the package wandb, which is not installed",
            "async_strategy=nvrx needs the package nvidia_resiliency_ext",
        ],
    ),
    "energon_readers_fit_batch": (
        {"dataset": EnergonProvider(path="x", seq_length=32, readers=3)},
        2,
        ["dataset.readers=3", "data parallel size 2", "global_batch_size=8"],
    ),
    "most_recent_k_keeps_one": (
        {"checkpoint.most_recent_k": 0},
        1,
        ["most_recent_k=0", "at least 1, or -1"],
    ),
    "mechanism_is_the_only_one": (
        {"checkpoint.fully_parallel_save": False},
        1,
        ["checkpoint.fully_parallel_save=False", "leave it True"],
    ),
    "finetune_saves_to_another_folder": (
        {"checkpoint.save": "run", "checkpoint.load": "./run", "checkpoint.finetune": True},
        1,
        ["checkpoint.finetune=True", "checkpoint.load=./run", "choose another checkpoint.save"],
    ),
    "settings_have_effect": (
        {"checkpoint.save_interval": 5, "scheduler.lr_wsd_decay_iters": 3},
        1,
        [
            "scheduler.lr_wsd_decay_iters=3 has no effect without scheduler.lr_decay_style=WSD",
            "checkpoint.save_interval=5 has no effect without checkpoint.save: set that, too, or remove it",
        ],
    ),
}


IN_MEMORY = {
    "checkpoint.save": "run",
    "checkpoint.non_persistent_ckpt_type": "in_memory",
    "checkpoint.non_persistent_save_interval": 1,
}
FSDP = {"ddp.data_parallel_sharding_strategy": "optim"}
NO_TEST = NVRxStragglerDetectionConfig(False, 300.0, False, False)

# what is set, and what the sentences of the tables of related settings say
RELATED = [
    ({VP: 2}, [f"{VP}=2 needs {PP} > 1"]),
    ({VP: 1, PP: 2}, [f"{VP}=1: must be at least 2"]),
    ({ETP: 2}, [f"{ETP}=2 has no effect without model.num_moe_experts"]),
    (
        {"optimizer.optimizer": "sgd", "ddp.use_distributed_optimizer": True},
        ["needs optimizer.optimizer=adam"],
    ),
    (
        {"optimizer.optimizer": "muon", "mixed_precision": "fp16_mixed"},
        ["optimizer=muon needs optimizer.fp16=False"],
    ),
    (
        {"ddp.num_distributed_optimizer_instances": 2, "ddp.use_distributed_optimizer": False},
        [
            "num_distributed_optimizer_instances=2 needs ddp.use_distributed_optimizer=True or dist.use_torch_fsdp2"
        ],
    ),
    (FSDP, ["data_parallel_sharding_strategy=optim needs ddp.use_megatron_fsdp=True"]),
    (
        {"ddp.use_custom_fsdp": True},
        ["ddp.use_custom_fsdp=True: the old name of ddp.use_megatron_fsdp"],
    ),
    (
        {"ddp.overlap_param_gather": True, "ddp.use_distributed_optimizer": False},
        ["needs ddp.use_distributed_optimizer=True", "needs ddp.overlap_grad_reduce=True"],
    ),
    (
        {"model.overlap_p2p_comm": True, "model.batch_p2p_comm": False, PP: 2},
        [f"overlap_p2p_comm=True needs {VP} > 1"],
    ),
    (
        {"model.tp_comm_overlap": True, TP: 2},
        ["tp_comm_overlap=True needs model.sequence_parallel=True"],
    ),
    (
        {"model.delay_wgrad_compute": True, "ddp.delay_wgrad_compute": True},
        ["delay_wgrad_compute=True needs model.overlap_moe_expert_parallel_comm=True"],
    ),
    (
        {"model.defer_embedding_wgrad_compute": True},
        [
            f"defer_embedding_wgrad_compute=True needs {PP} > 1",
            "needs model.gradient_accumulation_fusion=True",
        ],
    ),
    (
        {
            "model.overlap_moe_expert_parallel_comm": True,
            "model.recompute_granularity": "full",
            PP: 2,
        },
        [
            f"{EP} > 1; ",
            "model.bf16 or model.fp16",
            f"{PP}=1 or {VP} > 1",
            "recompute_granularity!=full",
        ],
    ),
    (
        {"optimizer.optimizer_cpu_offload": True, "optimizer.optimizer": "sgd"},
        [
            "optimizer.optimizer=adam; ",
            "use_distributed_optimizer=True",
            "optimizer_offload_fraction > 0",
        ],
    ),
    (
        {
            "optimizer.use_precision_aware_optimizer": True,
            "optimizer.main_params_dtype": torch.float16,
        },
        ["use_precision_aware_optimizer=True needs optimizer.main_params_dtype=torch.float32"],
    ),
    (
        {
            "dist.use_torch_fsdp2": True,
            "rng.data_parallel_random_init": True,
            "model.cpu_offloading": True,
        },
        [
            "use_torch_fsdp2=True needs model.cpu_offloading=False; rng.data_parallel_random_init=False: use ",
            "ddp.use_distributed_optimizer=true",
        ],
    ),
    (
        {"model.fine_grained_activation_offloading": True},
        ["needs model.offload_modules", "core_attn"],
    ),
    (
        {"train.rampup_batch_size": [4, 4, 100], "dataset.dataloader_type": "batch"},
        [
            "rampup_batch_size=[4, 4, 100] needs dataset.dataloader_type=single or dataset.dataloader_type=cyclic"
        ],
    ),
    (
        {"checkpoint.non_persistent_ckpt_type": "local", "checkpoint.save": "run"},
        ["set both", "give a folder on a local"],
    ),
    (
        {"checkpoint.non_persistent_global_ckpt_dir": "x"},
        ["no effect without checkpoint.non_persistent_ckpt_type=global"],
    ),
    (IN_MEMORY, ["non_persistent_ckpt_type=in_memory needs inprocess_restart", "/dev/shm"]),
    ({"peft": LoRA()}, ["peft needs checkpoint.pretrained_checkpoint: give the weights"]),
    (
        {
            "model.head": "embedding",
            "train.micro_batch_size": 1,
            "model.contrastive_temperature": 0.0,
        },
        [
            "head=embedding needs train.micro_batch_size > 1 or model.hard_negatives > 0",
            "model.gather_negatives; model.contrastive_temperature > 0: raise them",
        ],
    ),
    (
        {"model.num_layers_in_first_pipeline_stage": 4},
        [f"num_layers_in_first_pipeline_stage=4 has no effect without {PP} > 1"],
    ),
    (
        {"nvrx_straggler": NO_TEST},
        ["nvrx_straggler needs nvrx_straggler.calc_relative_gpu_perf or"],
    ),
    ({"profiling": ProfilingConfig(use_pytorch_profiler=True)}, ["needs logger.log_dir: give"]),
    (
        {"profiling": ProfilingConfig(nvtx_ranges=True, record_shapes=True)},
        ["record_shapes=True has no effect without"],
    ),
    (
        {"model.head": "embedding", "dpo": DPOConfig()},
        ["model.head=embedding and dpo exclude each other"],
    ),
    (
        {"distill": DistillConfig(), "dpo": DPOConfig()},
        ["dpo and distill exclude", "distill needs distill.teacher or"],
    ),
    (
        {"grpo": GRPOConfig(), "dpo": DPOConfig(), "train.iterations_to_skip": [3]},
        [
            "grpo and dpo exclude",
            "grpo and train.iterations_to_skip=[3] exclude",
        ],
    ),
    (
        {"grpo": GRPOConfig(loss_type="luspo", epsilon_high=0.3, kl_estimator="k1")},
        [
            "grpo.loss_type=luspo needs grpo.importance_sampling_level=sequence",
            "grpo.kl_estimator=k1 has no effect without grpo.beta",
        ],
    ),
    (
        {"grpo": GRPOConfig(loss_type="cispo", epsilon=0.1, top_p=0.0, num_generations=1)},
        [
            "grpo.loss_type=cispo needs grpo.epsilon_high > 0",
            "grpo.epsilon=0.1 has no effect",
            "grpo.top_p=0.0: must be above 0 and at most 1",
            "needs grpo.num_generations > 1",
            "set grpo.advantage_estimator=gae",
        ],
    ),
    (
        {
            "grpo": GRPOConfig(advantage_estimator="gae", dynamic_sampling=True, num_generations=1),
            "checkpoint.non_persistent_ckpt_type": "local",
        },
        [
            "grpo.advantage_estimator=gae needs grpo.dynamic_sampling=False",
            "checkpoint.non_persistent_ckpt_type=None",
        ],
    ),
    (
        {"grpo": GRPOConfig(critic=CriticConfig(lam=0.9))},
        ["grpo.critic", "has no effect without grpo.advantage_estimator=gae"],
    ),
    (
        {"grpo": GRPOConfig(importance_sampling_correction=True, temperature=0.7)},
        ["grpo.importance_sampling_correction=True needs grpo.temperature=1.0"],
    ),
    (
        {
            "grpo": GRPOConfig(
                exact_rollout=True, temperature=0.7, importance_sampling_correction=True
            ),
            "model.context_parallel_size": 2,
            "model.hidden_dropout": 0.1,
            "model.attention_dropout": 0.1,
        },
        [
            "grpo.exact_rollout=True needs grpo.temperature=1.0",
            "model.context_parallel_size=1",
            "model.hidden_dropout=0.0",
            "model.attention_dropout=0.0",
            "grpo.importance_sampling_correction=False",
            "switch exact_rollout off",
        ],
    ),
    (
        {"grpo": GRPOConfig(router_replay=True)},
        ["grpo.router_replay=True, but the model has no experts: leave it out"],
    ),
    (
        {"grpo": GRPOConfig(loss_type="ppo")},
        ["grpo.loss_type=ppo: use one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo"],
    ),
    (
        {"dpo": DPOConfig(label_smoothing=0.5)},
        ["dpo.label_smoothing=0.5: must be at least 0 and below 0.5"],
    ),
    (
        {"dpo": DPOConfig(loss_type="slic", label_smoothing=0.1, desirable_weight=2.0)},
        [
            "dpo.loss_type=slic: use one of sigmoid, ipo, hinge, kto, cpo, simpo, orpo",
            "label_smoothing=0.1 has no effect without dpo.loss_type=sigmoid",
            "desirable_weight=2.0 has no effect without dpo.loss_type=kto",
        ],
    ),
]

BY_NAME = {rule.__name__: rule for rule in (*rules.SIZE_RULES, *rules.RULES, *rules.LOCAL_RULES)}


BIASED_EXPERTS = {
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.add_bias_linear": True,
    "model.moe_token_dispatcher_type": "alltoall",
}


def configured(values):
    config = toy_config()
    for key, value in values.items():
        *blocks, name = key.split(".")
        owner = config
        for block in blocks:
            owner = getattr(owner, block)
        setattr(owner, name, value)
    return config


OTHER = {bool: True, int: 7, float: 7.0, str: "other"}
BLOCKS = {
    "comm_overlap": CommOverlapConfig,
    "profiling": lambda: ProfilingConfig(nvtx_ranges=True),
    "rerun_state_machine": RerunStateMachineConfig,
    "ft": FaultToleranceConfig,
    "distill": DistillConfig,
    "dpo": lambda: DPOConfig(loss_type="orpo"),
    "grpo": lambda: GRPOConfig(loss_type="sapo", advantage_estimator="rloo"),
}


def value_that_meets(condition):
    """A value of the setting of ``condition`` with which the condition is met."""
    match condition:
        case Equals():
            return condition.value
        case Exceeds():
            return condition.bound + 1
        case _:
            return True


@pytest.mark.parametrize("key", idle_settings.NEEDS)
def test_a_setting_needs_what_it_is_a_setting_of(key):
    condition = idle_settings.NEEDS[key].alternatives[0]
    blocks = {name: make() for name, make in BLOCKS.items()}
    if condition == Equals("grpo.loss_type", "sapo"):
        blocks["grpo"].loss_type = "vespo"
    if condition == On("validation.eval_iters"):
        blocks["validation"] = ValidationConfig(eval_iters=0)
    default = configured(blocks)
    assert not [*idle_settings.settings_have_effect(default, 1)]
    value = value_of(default, key)
    changed = blocks | {key: False if value is True else OTHER[type(value or "")]}
    assert next(idle_settings.settings_have_effect(configured(changed), 1)).startswith(f"{key}=")
    # the feature may be a setting of another one
    outer = idle_settings.NEEDS.get(condition.key, Equals("checkpoint.save", "run"))
    with_it = configured(
        changed
        | {"checkpoint.save": "run"}
        | {outer.key: value_that_meets(outer)}
        | {condition.key: value_that_meets(condition)}
    )
    assert not [*idle_settings.settings_have_effect(with_it, 1)]


def excluded(keys, values):
    """The sentences about both ``keys``, when they have ``values``."""
    config = configured(
        {"distill": DistillConfig(), "peft": LoRA(), **dict(zip(keys, values, strict=True))}
    )
    found = related_settings.settings_do_not_exclude_each_other(config, 1)
    return [sentence for sentence in found if all(f"{key}=" in sentence for key in keys)]


@pytest.mark.parametrize(
    "row", related_settings.EXCLUSIONS, ids=lambda row: f"{row.first}-{row.second}"
)
def test_two_settings_exclude_each_other(row):
    keys = (row.first, row.second)
    (sentence,) = excluded(keys, (True, True))
    assert sentence.endswith(row.remedy)
    assert not excluded(keys, (True, False))
    assert not excluded(keys, (False, True))


def keys_of_conditions():
    conditions = [*idle_settings.NEEDS.values(), *idle_settings.NEEDS_BY_PREFIX.values()]
    for row in related_settings.REQUIREMENTS:
        conditions += [row.when, *row.needs]
    return sorted({one.key for condition in conditions for one in condition.alternatives})


@pytest.mark.parametrize("key", keys_of_conditions())
def test_every_condition_is_on_a_setting(key):
    others = {
        "profiling": ProfilingConfig,
        "nvrx_straggler": NVRxStragglerDetectionConfig,
        "dpo": DPOConfig,
        "grpo": GRPOConfig,
    }
    others |= {"distill": DistillConfig, "inprocess_restart": InProcessRestartConfig, "peft": LoRA}
    others |= {name: type(make()) for name, make in BLOCKS.items()}
    block, _, name = key.partition(".")
    owner = others[block] if block in others else type(getattr(toy_config(), block))
    kinds = {"model": [owner, MambaModelProvider]}.get(block, [owner])
    assert not name or any(name in {entry.name for entry in fields(kind)} for kind in kinds)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adaptive_muon", ["scale_mode", "use muon"]),
        ("soap", ["square matrices", "use muon"]),
        ("dist_muon", ["use muon with", "use_layer_wise_distributed_optimizer=true"]),
        ("dist_adaptive_muon", ["scale_mode"]),
    ],
)
def test_optimizers_that_are_impossible_say_why(name, words):
    with pytest.raises(UserError) as refusal:
        configured({"optimizer.optimizer": name}).validate(1)
    for word in (f"optimizer.optimizer={name}: ", *words):
        assert word in str(refusal.value)


@pytest.mark.parametrize(("values", "words"), RELATED)
def test_related_settings_are_refused(values, words):
    with pytest.raises(UserError) as refusal:
        configured(values).validate(4)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("key", rule_fields.UNAVAILABLE)
def test_a_setting_is_not_available(key):
    (sentence,) = rule_fields.unavailable_settings_are_unset(configured({key: 7}), 1)
    assert sentence == f"{key}=7: {rule_fields.UNAVAILABLE[key]}"


def test_every_rule_has_a_case():
    assert set(BY_NAME) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_rule_refuses(name, monkeypatch):
    monkeypatch.setattr(rules.machine, "installed", lambda package: False)
    values, world_size, words = CASES[name]
    config = configured(values)
    sentences = [*BY_NAME[name](_resolved(config, world_size), world_size)]
    assert sentences
    assert BY_NAME[name].__doc__
    for word in words:
        assert any(word in sentence for sentence in sentences)
    assert not any("\n" in sentence for sentence in sentences)
    here = BY_NAME[name] in rules.LOCAL_RULES
    with pytest.raises(UserError) as refusal:
        config.validate(None if here else world_size)
    assert set(sentences) <= set(str(refusal.value).splitlines())
    if here:
        configured(values).validate(
            world_size
        )  # for another machine, which may have what this one lacks


OUT_OF_RANGE = {
    "logger.peak_tflops": 0.0,
    "model.hidden_dropout": 1.0,
    "checkpoint.save_interval": 0,
    "validation.eval_iters": -1,
    "train.iterations_to_skip": [3, 0],
    "train.exit_duration_in_mins": 0,
    "dist.hang_timeout_minutes": -1.0,
    "optimizer.clip_grad": -1.0,
    "optimizer.adam_beta2": 1.0,
    "ddp.bucket_size": 0,
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused_by_name(key):
    value = OUT_OF_RANGE[key]
    with pytest.raises(UserError, match=re.escape(f"{key}={value}: must {all_ranges()[key].rule}")):
        configured({key: value}).validate(1)


@pytest.mark.parametrize("key", all_ranges())
def test_every_range_is_of_a_setting(key):
    block, _, name = key.partition(".")
    kinds = [
        GPTModelProvider,
        LoRA,
        StragglerDetectionConfig,
        GPTDatasetConfig,
        SFTDatasetConfig,
        DistillConfig,
    ]
    kinds += [DPOConfig, GRPOConfig]
    kinds += (
        [type(getattr(toy_config(), block))] if getattr(toy_config(), block) is not None else []
    )
    assert any(name in {entry.name for entry in fields(kind)} for kind in kinds)


def _resolved(config, world_size):
    """The config as the rules find it: those on sizes come before values are derived."""
    if rules.violations(rules.SIZE_RULES, config, world_size):
        return config
    return resolve(config, world_size, Hardware.detect(runs_here=False)).config


@pytest.mark.parametrize(
    ("values", "world_size"),
    [
        ({}, 1),
        ({}, 4),
        ({TP: 2, PP: 2, VP: 2, "model.sequence_parallel": True}, 8),
        ({TP: 4}, 4),  # more ranks than groups of keys and values
        ({CP: 2, "model.cp_comm_type": "a2a"}, 2),
        ({CP: 4, "model.cp_comm_type": "a2a"}, 4),  # key heads are repeated
        ({CP: 2}, 4),
        (
            {
                PP: 3,
                "model.num_layers_in_first_pipeline_stage": 2,
                "model.num_layers_in_last_pipeline_stage": 1,
            },
            3,
        ),
        ({"ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True}, 2),
        # experts with biases are whole: two ranks do for two halves of the experts
        ({TP: 2, EP: 2, "model.sequence_parallel": True, **BIASED_EXPERTS}, 2),
        ({"ddp.use_megatron_fsdp": True, "ddp.bucket_size": 1000}, 4),
        ({"ddp.use_megatron_fsdp": True, "ddp.data_parallel_sharding_strategy": "optim"}, 1),
        ({"scheduler.lr_decay_style": "WSD", "scheduler.lr_wsd_decay_iters": 3}, 1),
    ],
)
def test_good_layouts_pass(values, world_size):
    configured(values).validate(world_size)


def test_all_problems_are_reported_together():
    config = configured(
        {TP: 3, "train.global_batch_size": 7, "optimizer.lr": None, "dataset.seq_length": 64}
    )
    with pytest.raises(UserError) as refusal:
        config.validate(3)
    lines = str(refusal.value).splitlines()
    assert len(lines) >= 5
    assert all(line == line.strip() for line in lines)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {ETP: 2, **BIASED_EXPERTS},
            "expert_tensor_parallel_size=2 cannot cut experts that have biases",
        ),
        # unset, it is the size of the other layers
        ({"model.num_moe_experts": 4, "optimizer.optimizer": "muon"}, f"{ETP}=2 with muon"),
    ],
)
def test_experts_that_are_cut_where_they_cannot_be(values, sentence):
    with pytest.raises(UserError, match=sentence):
        configured({TP: 2, "model.sequence_parallel": True, **values}).validate(2)
