# SPDX-License-Identifier: Apache-2.0
"""Predict the step time of a config: its layers are counted on the meta device and timed by ``time.step``."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.layers import layer_shape, layers_of
from megatron.bridge.autotune.memory import bucket_size
from megatron.bridge.autotune.profile import MeasuredKernels, Profile
from megatron.bridge.autotune.time.kernels import Precision, Roofline
from megatron.bridge.autotune.time.schedule import pipeline_of
from megatron.bridge.autotune.time.step import Chunk, Plan, Prediction, StepSettings, predict_step
from megatron.bridge.autotune.time.work import LayerSettings, LayerShape, operations_per_token
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.context_sharing import microbatch_tokens
from megatron.bridge.training.config.resolve.precision import without_quantization

# Fraction of a layer's forward time in norms and in the activations of experts, by which selective recomputation
# lengthens the backward pass; memory bandwidth limits both.
_SMALL = {"layernorm": 0.03, "moe_act": 0.03}
_MODULES = {
    "mlp": ("linear_fc1", "linear_fc2"),
    "mla_up_proj": ("linear_q_up_proj", "linear_kv_up_proj"),
    "shared_experts": ("linear_fc1", "linear_fc2"),
}


def predict(
    config: ConfigContainer, world_size: int, card: str, profile: Profile | None = None
) -> Prediction:
    """Predict the time of a training step of a resolved config on GPUs named ``card`` in ``gpus.GPUS``.

    ``profile`` replaces data sheets.
    """
    plan = plan_of(config, meta_model.stage_chunks(without_quantization(config.model), config.peft))
    return predict_step(
        plan, setting_of(config, world_size), roofline_of(config, card, profile, world_size)
    )


def plan_of(config: ConfigContainer, stages: Sequence[Sequence[MegatronModule]]) -> Plan:
    """Describe the layers of all stages as numbers."""
    hidden = config.model.hidden_size
    length = config.dataset.seq_length
    losses = 1 + (getattr(config.model, "mtp_num_layers", None) or 0)

    def chunk_of(chunk: Any) -> Chunk:
        layers = tuple(layer_shape(layer, hidden, length) for layer in layers_of(chunk))
        return Chunk(layers, bool(chunk.pre_process), losses if chunk.post_process else 0)

    return tuple(tuple(chunk_of(chunk) for chunk in chunks) for chunks in stages)


def roofline_of(
    config: ConfigContainer, card: str, profile: Profile | None = None, world_size: int = 1
) -> Roofline:
    """Return the kernels of GPU ``card`` in the precision of the config's matrix products, or those of a profile."""
    if profile is not None:
        return MeasuredKernels(profile.card(), profile=profile, world_size=world_size)
    model = config.model
    precision: Precision = "fp8" if model.fp8 else "fp4" if model.fp4 else "bf16"
    gpu_row = gpu(card)
    if not {"bf16": gpu_row.bf16, "fp8": gpu_row.fp8, "fp4": gpu_row.fp4}[precision]:
        precision = "bf16"
    attention = model.fp8_dot_product_attention or model.fp8_multi_head_attention
    return Roofline(gpu_row, precision, fp8_attention=precision == "fp8" and attention)


def setting_of(config: ConfigContainer, world_size: int) -> StepSettings:
    model: Any = config.model
    train = config.train
    ddp = config.ddp
    rows = model.padded_vocab_size // model.tensor_model_parallel_size
    stages = model.pipeline_model_parallel_size
    experts = model.expert_tensor_ranks * model.expert_model_parallel_size
    replicas = world_size // (model.tensor_model_parallel_size * stages)
    return StepSettings(
        pipeline=pipeline_of(config, world_size),
        run=run_of(config),
        recompute=recompute_of(config),
        vocabulary=rows,
        embedding_weights=rows * model.hidden_size,
        tied=model.share_embeddings_and_output_weights,
        world_size=world_size,
        replicas=replicas,
        bucket=bucket_size(config, replicas),
        expert_replicas=max(1, world_size // (experts * stages)),
        sharded=bool(ddp.use_distributed_optimizer),
        gradient=4 if ddp.grad_reduce_in_fp32 else 2,
        parameter=1 if ddp.fp8_param_gather else 2,
        overlap_gradients=bool(ddp.overlap_grad_reduce),
        overlap_parameters=bool(ddp.overlap_param_gather),
        overlap_messages=bool(model.overlap_p2p_comm),
        launches_kernels=model.cuda_graph_impl == "none",
        tokens=train.global_batch_size * config.dataset.seq_length,
    )


def run_of(config: ConfigContainer) -> LayerSettings:
    model = config.model
    experts = model.num_moe_experts or 0
    kind = model.cp_comm_type
    return LayerSettings(
        tokens=microbatch_tokens(config),
        hidden=model.hidden_size,
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        expert=model.expert_model_parallel_size,
        expert_tensor=model.expert_tensor_ranks,
        local_experts=max(1, experts // model.expert_model_parallel_size),
        top_k=model.moe_router_topk or 0,
        sequence_parallel=model.sequence_parallel,
        tensor_overlap=bool(model.tp_comm_overlap),
        expert_overlap=bool(model.overlap_moe_expert_parallel_comm),
        flex=model.moe_token_dispatcher_type == "flex",
        context_kind=kind[0] if isinstance(kind, list) and kind else kind,
        number=2 if model.bf16 or model.fp16 else 4,
    )


def recompute_of(config: ConfigContainer) -> Callable[[LayerShape, int], float]:
    """Return a function of a layer and its index in its chunk: the fraction of the forward pass that is recomputed."""
    model = config.model
    if model.recompute_granularity == "selective":
        modules = tuple(model.recompute_modules or ("core_attn",))
        run = run_of(config)
        return lambda layer, index: _recomputed_share(layer, modules, run)
    if model.recompute_granularity != "full":
        return lambda layer, index: 0.0
    if model.recompute_method == "block":
        count = model.recompute_num_layers or 0
        return lambda layer, index: float(index < count)
    return lambda layer, index: 1.0


@lru_cache(maxsize=4096)
def _recomputed_share(layer: LayerShape, modules: tuple[str, ...], run: LayerSettings) -> float:
    all_operations = operations_per_token(layer, run)
    again = 0.0
    for module in modules:
        names = _MODULES.get(module, ())
        again += sum(
            2 * matrix.rows * matrix.columns for matrix in layer.matrices if matrix.name in names
        )
        if module == "core_attn" and layer.quadratic:
            again += layer.between
        if module == "moe":
            again += (
                sum(2 * matrix.rows * matrix.columns for matrix in layer.experts)
                * run.top_k
                / run.tensor
            )
        again += _SMALL.get(module, 0.0) * all_operations
    return (
        min(1.0, again / all_operations) if all_operations else 0.0
    )  # architecture search may remove all operations of a layer
