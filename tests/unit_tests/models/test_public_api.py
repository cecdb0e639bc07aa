# SPDX-License-Identifier: Apache-2.0
"""Names and keywords that scripts written for the API use: adding is free, losing one breaks users."""

import importlib
import inspect

import pytest

KEYWORDS = {
    "models.conversion.auto_bridge.AutoBridge": {
        "from_hf_pretrained": "path trust_remote_code",
        "from_hf_config": "config",
        "can_handle": "path trust_remote_code",
        "supports": "config",
        "list_supported_models": "",
        "import_ckpt": "hf_model_id megatron_path",
        "export_ckpt": "megatron_path hf_path show_progress strict source_path",
        "to_megatron_provider": "load_weights hf_path",
        "to_megatron_model": "load_weights hf_path",
        "load_hf_weights": "model hf_path allowed_mismatched_params",
        "export_hf_weights": "model cpu show_progress conversion_tasks merge_adapter_weights",
        "save_hf_pretrained": "model path show_progress source_path strict merge_adapter_weights",
        "save_hf_weights": "model path",
        "save_megatron_model": "model path hf_tokenizer_path",
        "load_megatron_model": "path mp_overrides",
        "get_conversion_tasks": "model hf_path",
        "push_to_hub": "path",
        "export_adapter_weights": "model cpu show_progress",
        "save_hf_adapter": "model path peft_config",
    },
    "models.gpt_provider.GPTModelProvider": {
        "finalize": "",
        "provide": "pre_process post_process vp_stage",
        "provide_distributed_model": "ddp_config wrap_with_ddp fp16 bf16 use_cpu_initialization pre_wrap_hook"
        " post_wrap_hook data_parallel_random_init",
        "initialize_model_parallel": "seed seed_kwargs",
        "register_pre_wrap_hook": "hook prepend",
        "register_post_wrap_hook": "hook prepend",
        "meta_model": "",
    },
    "data.builders.hf_dataset.HFDatasetConfig": {
        "__init__": "dataset_name process_example_fn seq_length seed dataloader_type num_workers do_validation"
        " do_test val_proportion packed_sequence_specs"
    },
    "data.datasets.packed_sequence.PackedSequenceSpecs": {
        "__init__": "packed_sequence_size pad_seq_to_mult"
    },
    "data.datasets.sft.GPTSFTDataset": {
        "__init__": "file_path tokenizer max_seq_length max_num_samples seed add_bos add_eos label_key"
        " answer_only_loss truncation_field truncation_method prompt_template"
    },
    "training.callbacks.CallbackManager": {"add": "", "register": "event_name fn"},
}
MEMBERS = {
    "models": "GPTModelProvider MLAModelProvider",
    "models.hf_pretrained": "PreTrainedCausalLM",
    "models.conversion.model_bridge": "MegatronModelBridge HFWeightTuple WeightConversionTask",
    "models.conversion.mapping_registry": "MegatronMappingRegistry",
    "models.conversion.param_mapping": "MegatronParamMapping DirectMapping ColumnParallelMapping"
    " RowParallelMapping"
    " ReplicatedMapping AutoMapping QKVMapping KVMapping ConcatenatedQKVMapping GatedMLPMapping merge_qkv_weights"
    " split_qkv_weights merge_qkv_biases split_qkv_biases merge_kv_weights split_kv_weights MambaInProjMapping"
    " MambaConv1dMapping GDNConv1dMapping GDNLinearMapping RMSNorm2ZeroCenteredRMSNormMapping",
    "peft.base": "PEFT",
    "peft.lora": "LoRA LoRAMerge",
    "peft.dora": "DoRA",
    "peft.canonical_lora": "CanonicalLoRA",
    "training.pretrain": "pretrain",
    "training.finetune": "finetune",
    "training.gpt_step": "forward_step",
    "training.vlm_step": "forward_step",
    "data.vlm_datasets": "HFDatasetConversationProvider MockVLMConversationProvider PreloadedVLMConversationProvider",
    "training.config": "ConfigContainer TrainingConfig ValidationConfig OptimizerConfig SchedulerConfig"
    " DistributedDataParallelConfig GPTDatasetConfig MockGPTDatasetConfig FinetuningDatasetConfig CheckpointConfig"
    " LoggerConfig RNGConfig DistributedInitConfig RerunStateMachineConfig StragglerDetectionConfig",
    "training.tokenizers.config": "TokenizerConfig",
    "training.mixed_precision": "MixedPrecisionConfig bf16_mixed fp16_mixed",
    "training.callbacks": "Callback CallbackContext CallbackManager",
    "data.builders.hf_dataset": "HFDatasetConfig",
    "data.builders.finetuning_dataset": "FinetuningDatasetConfig",
    "data.datasets.packed_sequence": "PackedSequenceSpecs",
    "data.datasets.sft": "GPTSFTDataset",
    "data.samplers": "MegatronPretrainingSampler MegatronPretrainingRandomSampler",
    "data.loaders": "get_blend_and_blend_per_split",
}


def load(path):
    return importlib.import_module(f"megatron.bridge.{path}")


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords(name):
    module, _, cls = name.rpartition(".")
    owner = getattr(load(module), cls)
    for method, expected in KEYWORDS[name].items():
        found = inspect.signature(getattr(owner, method)).parameters
        assert [keyword for keyword in expected.split() if keyword not in found] == [], (
            f"{cls}.{method}"
        )


@pytest.mark.parametrize("module", MEMBERS)
def test_members(module):
    found = load(module)
    assert [name for name in MEMBERS[module].split() if not hasattr(found, name)] == []
