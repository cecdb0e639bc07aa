# SPDX-License-Identifier: Apache-2.0
"""Every name that NeMo-RL's plain path imports is there: the stable surface of docs/rl.md."""

from importlib import import_module

import pytest

NAMES = {
    "": "AutoBridge",
    ".models.conversion.param_mapping": "GatedMLPMapping",
    ".models.model_provider": "ModelProviderMixin get_model",
    ".models.qwen_vl.modelling_qwen3_vl.model": "Qwen3VLModel",
    ".peft.lora": "LoRA",
    ".training.checkpointing": "_generate_model_state_dict _load_checkpoint_from_path "
    "_load_model_weights_from_checkpoint apply_peft_adapter_filter_to_state_dict checkpoint_exists "
    "init_checkpointing_context load_checkpoint maybe_finalize_async_save save_checkpoint",
    ".training.config": "CheckpointConfig ConfigContainer DistributedDataParallelConfig DistributedInitConfig "
    "LoggerConfig OptimizerConfig SchedulerConfig TokenizerConfig TrainingConfig",
    ".training.fault_tolerance": "setup maybe_setup_simulated_fault",
    ".training.initialize": "initialize_megatron set_jit_fusion_options",
    ".training.model_load_save": "load_model_config megatron_cpu_init_context save_megatron_model "
    "temporary_distributed_context",
    ".training.optim": "setup_optimizer",
    ".training.setup": "_create_peft_pre_wrap_hook _update_model_config_funcs",
    ".training.state": "GlobalState",
    ".training.tokenizers.tokenizer": "build_tokenizer",
    ".training.utils.flop_utils": "num_floating_point_operations",
    ".training.utils.packed_seq_utils": "get_packed_seq_cp_partition_indices",
    ".training.utils.pg_utils": "get_pg_collection",
    ".training.utils.sig_utils": "DistributedSignalHandler",
    ".training.utils.train_utils": "LinearForLastLayer create_value_head_hook "
    "logical_and_across_model_parallel_group reduce_max_stat_across_model_parallel_group",
    ".utils.common_utils": "get_rank_safe",
    ".utils.cuda_graph": "set_cuda_graph_modules",
    ".utils.vocab_utils": "calculate_padded_vocab_size",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module):
    found = import_module(f"megatron.bridge{module}")
    assert all(callable(getattr(found, name)) for name in NAMES[module].split())
