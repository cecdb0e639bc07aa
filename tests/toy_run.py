# SPDX-License-Identifier: Apache-2.0
"""A toy Llama-like run: its config under any layout, and initial weights that do not depend on the layout."""

import zlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_base, nested_values

from megatron.bridge.checkpoint.model_io import model_state
from megatron.bridge.models import GPTModelProvider, MambaModelProvider, MLAModelProvider
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step as gpt_forward_step
from megatron.bridge.training.pretrain import pretrain

SEQUENCE = 32
VOCABULARY = 96


def save_llama(directory, **changes):
    """Write a tiny random transformers model of the same size as the toy run's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": SEQUENCE,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**sizes | changes)).save_pretrained(directory)
    return directory


def toy_config(model=None, train=None, **blocks):
    """A config of two million operations a step; ``model`` and ``train`` override single fields."""
    provider = _provider_class(model or {})(
        **{
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 64,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "vocab_size": VOCABULARY,
            "seq_length": SEQUENCE,
            "share_embeddings_and_output_weights": False,
            "calculate_per_token_loss": True,
        }
        | (model or {})
    )
    return ConfigContainer(
        **{
            "train": TrainingConfig(
                **{"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 10} | (train or {})
            ),
            "model": provider,
            "optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5),
            # the first step of Adam divides each gradient by itself, its rounding included, so that layouts would
            # differ by more than rounding
            "scheduler": SchedulerConfig(
                lr_warmup_iters=2, lr_warmup_init=0.0, lr_decay_style="cosine"
            ),
            "dataset": MockGPTDatasetConfig(seq_length=SEQUENCE),
            "logger": LoggerConfig(log_interval=1000),
            "tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
            "checkpoint": CheckpointConfig(),
            "validation": ValidationConfig(eval_interval=5, eval_iters=1),
            "mixed_precision": "fp32",
        }
        | blocks
    )


def _provider_class(fields):
    if "hybrid_override_pattern" in fields:
        return MambaModelProvider
    return MLAModelProvider if fields.get("multi_latent_attention") else GPTModelProvider


def sparse_forward_step(data_iterator, model):
    """A forward step whose loss mask leaves out most tokens, and those of every fourth microbatch all."""
    batch = dict(next(data_iterator))
    generator = torch.Generator().manual_seed(int(batch["tokens"].sum()))
    mask = torch.rand(batch["loss_mask"].shape, generator=generator) < 0.3
    batch["loss_mask"] = (mask & (int(batch["tokens"][0, 0]) % 4 > 0)).float()
    return gpt_forward_step(iter([batch]), model)


def local_shards(chunks):
    """Every weight of this rank; a shard knows its place in the whole weight, its data is a view."""
    for state in model_state(chunks, {}).values():
        apply_factories(state)
        sharded, _ = extract_sharded_base(state)
        for shard in nested_values(sharded):
            if isinstance(shard, ShardedTensor):
                yield shard


@torch.no_grad()
def initialize_by_name(chunks):
    """Fill every weight from a generator seeded by its name and layer, as if the whole weight were drawn."""
    for shard in local_shards(chunks):
        whole = first_weight(shard.key, shard.global_shape)
        place = tuple(slice(start, start + size) for start, size in _place(shard))
        shard.data.copy_(whole[place].reshape(shard.data.shape))


def first_weight(name, shape):
    """The whole weight of a name, as every run begins with."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator)
    return 1 + 0.1 * whole if "norm" in name else 0.05 * whole


def _place(shard):
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return list(zip(shard.global_offset, sizes, strict=True))


def whole_weights(records):
    """Weights by name, put together from the records of all ranks."""
    weights = {}
    for record in records:
        for key, shape, place, data in record.shards:
            whole = weights.setdefault(key, torch.full(shape, float("nan")))
            whole[tuple(slice(start, start + size) for start, size in place)] = torch.from_numpy(
                data
            ).view([size for _, size in place])
    return weights


@dataclass
class Record(Callback):
    """The numbers of a run; the weights are this rank's shards."""

    losses: list = field(default_factory=list)
    grad_norms: list = field(default_factory=list)
    held_out: list = field(default_factory=list)
    further: dict = field(default_factory=dict)  # of the other losses, by name
    shards: list = field(default_factory=list)

    @property
    def numbers(self):
        """What all ranks should report alike."""
        return self.losses, self.grad_norms, self.held_out, self.further

    def on_train_step_end(self, context):
        for name, loss in context.loss_dict.items():
            (self.losses if name == "lm loss" else self.further.setdefault(name, [])).append(
                loss.item()
            )
        self.grad_norms.append(float(context.grad_norm))

    def on_eval_end(self, context):
        self.held_out.append(context.total_loss_dict["lm loss"].item())

    def on_train_end(self, context):
        self.shards = [
            (
                shard.key,
                tuple(shard.global_shape),
                _place(shard),
                shard.data.detach().float().numpy().copy(),
            )
            for shard in local_shards(context.model)
        ]


def run_toy(config_arguments, forward_step=gpt_forward_step, callbacks=()):
    """Train the toy on this rank, from weights that depend on their names only."""
    config = toy_config(**config_arguments)
    config.model.register_pre_wrap_hook(initialize_by_name)
    record = Record()
    try:
        pretrain(config, forward_step, [record, *callbacks])
    finally:
        parallel_state.destroy_model_parallel()
    return record
