# SPDX-License-Identifier: Apache-2.0
"""A complete config from a translated command line of Megatron-LM."""

from typing import Any

from megatron.bridge.cli.migrate.megatron_lm import LATENT_DEFAULTS, MegatronLMRun
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training import config as blocks
from megatron.bridge.utils.config.overrides import apply_overrides

_MODEL: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
}
_MODEL |= {"add_bias_linear": True, "hidden_dropout": 0.1, "should_pad_vocab": True}


def build(run: MegatronLMRun) -> blocks.ConfigContainer:
    """The config of the command line, with Megatron-LM's defaults."""
    dataset = (
        blocks.MockGPTDatasetConfig if "mock-data" in run.arguments else blocks.GPTDatasetConfig
    )
    config = blocks.ConfigContainer(
        model=_model(run),
        train=blocks.TrainingConfig(),
        validation=blocks.ValidationConfig(eval_interval=1000, eval_iters=100),
        optimizer=blocks.OptimizerConfig(min_lr=0.0),
        scheduler=blocks.SchedulerConfig(),
        dataset=dataset(seq_length=1, num_workers=2),
        logger=blocks.LoggerConfig(log_interval=100),
        tokenizer=blocks.TokenizerConfig(),
        checkpoint=blocks.CheckpointConfig(),
        ddp=blocks.DistributedDataParallelConfig(use_distributed_optimizer=False),
    )
    apply_overrides(config, run.translation.overrides(), "Megatron-LM")
    return config


def _model(run: MegatronLMRun) -> GPTModelProvider:
    experts = {"moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "allgather"}
    values = {**_MODEL, **(experts if "num-experts" in run.arguments else {})}
    if "model.hybrid_override_pattern" in run.translation.settings:
        return MambaModelProvider(**values)
    if "multi-latent-attention" in run.arguments:
        return MLAModelProvider(**{**values, **LATENT_DEFAULTS, "position_embedding_type": "rope"})
    return GPTModelProvider(**values)
