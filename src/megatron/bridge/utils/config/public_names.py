# SPDX-License-Identifier: Apache-2.0
"""The names under which classes and functions of this package are written to YAML: part of the file format.

Moving a class to another module changes a row here and no file. Renaming one needs a row in ``FORMER_NAMES``.
Files written by version 0.1 hold the module path of that time: its last part is the name.
"""

_MODULES: dict[str, tuple[str, ...]] = {
    "megatron.bridge.training.config": (
        "CheckpointConfig",
        "CommOverlapConfig",
        "ConfigContainer",
        "DPOConfig",
        "DistillConfig",
        "DistributedDataParallelConfig",
        "DistributedInitConfig",
        "FaultToleranceConfig",
        "InProcessRestartConfig",
        "LoggerConfig",
        "MixedPrecisionConfig",
        "NVRxStragglerDetectionConfig",
        "OptimizerConfig",
        "ParameterOverride",
        "ProfilingConfig",
        "RNGConfig",
        "RerunStateMachineConfig",
        "SchedulerConfig",
        "StragglerDetectionConfig",
        "TrainingConfig",
        "ValidationConfig",
    ),
    "megatron.bridge.data.config": (
        "BlendedDatasetConfig",
        "ClassificationDatasetConfig",
        "EmbeddingDatasetConfig",
        "FIMConfig",
        "FinetuningDatasetConfig",
        "GPTDatasetConfig",
        "MockGPTDatasetConfig",
        "PackedSequenceSpecs",
        "PreferenceDatasetConfig",
        "RewardDatasetConfig",
        "SFTDatasetConfig",
        "TokenClassificationDatasetConfig",
    ),
    "megatron.bridge.data.builders.hf_dataset": ("HFDatasetConfig",),
    "megatron.bridge.data.vlm_datasets": (
        "HFDatasetConversationProvider",
        "MockVLMConversationProvider",
        "PreloadedVLMConversationProvider",
    ),
    "megatron.bridge.data.energon": ("EnergonProvider",),
    "megatron.bridge.data.records.presets": ("alpaca_example",),
    "megatron.bridge.data.tokenizer": ("TokenizerConfig",),
    "megatron.bridge.models.gpt_provider": ("GPTModelProvider",),
    "megatron.bridge.models.heterogeneous_provider": ("HeterogeneousModelProvider",),
    "megatron.bridge.models.mamba_provider": ("MambaModelProvider",),
    "megatron.bridge.models.mla_provider": ("MLAModelProvider",),
    "megatron.bridge.models.vision.provider": ("VisionGPTModelProvider", "VisionHybridModelProvider"),
    "megatron.bridge.models.features.activations": ("gelu_fast", "gelu_new", "gelu_tanh", "xielu"),
    "megatron.bridge.backends.specs.layer_specs": ("decoder_block_spec", "layer_spec"),
    "megatron.bridge.peft.canonical_lora": ("CanonicalLoRA",),
    "megatron.bridge.peft.dora": ("DoRA",),
    "megatron.bridge.peft.lora": ("LoRA",),
    "megatron.bridge.recipes.squad": ("squad_example",),
}
FORMER_NAMES: dict[str, str] = {}  # names that files may still hold, and what they are called now

PUBLIC_NAMES: dict[str, str] = {name: module for module, names in _MODULES.items() for name in names}
"""Name in YAML -> module that holds it."""


def import_path(name: str) -> str:
    """The dotted path of what a file calls ``name``; a name of other packages is its own path."""
    last = name.rpartition(".")[2] if name.startswith("megatron.bridge.") else name
    last = FORMER_NAMES.get(last, last)
    return f"{PUBLIC_NAMES[last]}.{last}" if last in PUBLIC_NAMES else name
