# SPDX-License-Identifier: Apache-2.0
"""Choose a backend and describe the layers of a decoder for it.

Both backends have the same parameters and checkpoint keys: where Transformer Engine fuses a norm into the
following linear layer, the separate norm of the torch backend is saved under the fused name.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, get_backend
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.heterogeneous.heterogeneous_config import TransformerBlockConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatron.bridge.backends.attention.kernel_choice import install_kernel_choice
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.hardware import compiler
from megatron.bridge.backends.kernels import compiled, eager, mtp_loss
from megatron.bridge.backends.moe import aux_loss_metrics
from megatron.bridge.backends.specs import layer_features
from megatron.bridge.backends.specs.torch_spec import TorchLatentAttention, TorchSpecProvider
from megatron.bridge.utils.errors import UserError

BACKENDS = ("torch", "transformer_engine")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed, even if it cannot run on this machine."""
    return HAVE_TE


def resolve_backend(name: str = "auto") -> str:
    """Return ``torch`` or ``transformer_engine``; ``auto`` selects the fastest backend that this machine can run."""
    usable = HAVE_TE and has_cuda()
    if name == "auto":
        return "transformer_engine" if usable else "torch"
    if name not in BACKENDS:
        raise UserError(f"backend={name!r} is not one of 'auto', 'torch', 'transformer_engine'")
    if name == "transformer_engine" and not usable:
        reason = (
            "this machine has no CUDA device" if HAVE_TE else "Transformer Engine is not installed"
        )
        raise UserError(
            f"backend='transformer_engine' cannot run here: {reason}; use 'torch' or 'auto'"
        )
    return name


def decoder_block_spec(
    config: TransformerConfig, backend: str, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the specs of this pipeline rank's layers in virtual stage ``vp_stage``, and of the final norm."""
    install_kernel_choice()
    if config.num_moe_experts is not None:
        aux_loss_metrics.install_growing_tracker()
    if backend == "transformer_engine":
        block = _transformer_engine_block(config, vp_stage)
        return _with_features(block, config, get_backend("transformer_engine"), vp_stage)
    provider = TorchSpecProvider()
    has_experts = moe_pattern(config)
    specs = {moe: layer_spec(config, provider, bool(moe)) for moe in set(has_experts)}
    layers = [specs[has_experts[index]] for index in _layers_here(config, vp_stage)]
    blocks = getattr(config, "per_block_parameters", None)
    if blocks is not None:
        layers = [
            heterogeneous_layer(spec, blocks[index])
            for spec, index in zip(layers, _layers_here(config, vp_stage), strict=True)
        ]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm())
    return _with_features(block, config, provider, vp_stage)


def _with_features(
    block: TransformerBlockSubmodules,
    config: Any,
    provider: BackendSpecProvider,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """Add the features that ``config`` declares; a provider also has those of ``models.features``."""
    block = layer_features.add_features(block, config, provider)
    layers = [
        with_provider_features(spec, config, index + 1, provider)
        for spec, index in zip(block.layer_specs or [], _layers_here(config, vp_stage), strict=True)
    ]
    return dataclasses.replace(block, layer_specs=layers)


def with_provider_features(
    spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
) -> ModuleSpec:
    """Return the spec of a layer with the features of ``config``, which has them if it is a model provider.

    Args:
        spec: Of a decoder layer.
        config: May be a plain config of Megatron-Core.
        layer_number: Counted from 1; None in a hybrid model, whose layers of a kind share a spec.
        provider: That of the backend for which ``spec`` was made.
    """
    change = getattr(config, "change_layer_spec", None)
    return spec if change is None else change(spec, layer_number, provider)


def _transformer_engine_block(
    config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    if config.heterogeneous_block_specs:
        # here, because its import warns about missing Apex, which only its other backend uses
        from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs as own

        return own.get_gpt_heterogeneous_layer_spec(config, use_te=True, vp_stage=vp_stage)  # type: ignore[arg-type]
    if config.experimental_attention_variant is None:
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
        )
    else:
        block = get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=vp_stage
        )
    layers = block.layer_specs or []
    return dataclasses.replace(block, layer_specs=[_with_own_attention(spec) for spec in layers])


class LatentAttention(MLASelfAttention):
    """Multi-latent attention of Transformer Engine's layers.

    If queries have no latent, Megatron-Core's class fuses their projection with a norm that such models do not have.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {
            **super()._resolve_qk_norm_config(submodules),
            "linear_q_proj": submodules.linear_q_proj,
        }


def _with_own_attention(spec: ModuleSpec) -> ModuleSpec:
    """Replace Megatron-Core's latent attention by this package's."""
    parts: Any = spec.submodules
    if parts.self_attention.module is not MLASelfAttention:
        return spec
    attention = dataclasses.replace(parts.self_attention, module=LatentAttention)
    return dataclasses.replace(
        spec, submodules=dataclasses.replace(parts, self_attention=attention)
    )


def mtp_block_spec(
    config: TransformerConfig,
    decoder: TransformerBlockSubmodules | ModuleSpec,
    backend: str,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return multi-token-prediction layers like the last layer of ``decoder``, or None if this rank builds none."""
    aux_loss_metrics.grow_mtp_metrics(config.mtp_num_layers or 0)
    mtp_loss.install()
    if not getattr(decoder, "layer_specs", True):
        raise UserError(
            f"pipeline_model_parallel_layout={config.pipeline_model_parallel_layout} puts multi-token prediction "
            "(m) on a stage without decoder layers, but it copies the last one: put a layer (t) before it"
        )
    provider: BackendSpecProvider = (
        get_backend("transformer_engine")
        if backend == "transformer_engine"
        else TorchSpecProvider()
    )
    return get_gpt_mtp_block_spec_for_backend(config, decoder, provider, vp_stage=vp_stage)


def moe_pattern(config: TransformerConfig) -> list[int]:
    """Return 1 for each decoder layer with experts, 0 for each dense layer."""
    if config.num_moe_experts is None:
        return [0] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [int(index % frequency == 0) for index in range(config.num_layers)]
    return listed_pattern(config, "moe_layer_freq", "0 (dense) or 1 (experts)")


def listed_pattern(config: TransformerConfig, field: str, kinds: str) -> list[int]:
    """Return the list of numbers ``field``, one for each layer; ``kinds`` says what they are in a message."""
    pattern: list[int] = getattr(config, field)
    if len(pattern) != config.num_layers or set(pattern) - {0, 1}:
        raise UserError(
            f"{field}={pattern} must hold a {kinds} for each of the {config.num_layers} layers of num_layers"
        )
    return list(pattern)


def _layers_here(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)  # type: ignore[union-attr]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def layer_spec(config: TransformerConfig, provider: BackendSpecProvider, moe: bool) -> ModuleSpec:
    """Return the spec of a decoder layer with separate norms, attention, and an MLP or experts (``moe``).

    Attention is multi-head or multi-latent, as in ``config``.
    """
    attention = _latent_attention if config.multi_latent_attention else _attention_spec
    norm = provider.layer_norm(has_residual=True)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention(config, provider),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type] - a function, as in Megatron-Core's specs
            pre_mlp_layernorm=norm,
            mlp=_mlp_spec(config, provider, moe),
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            sharded_state_dict_keys_map=_fused_names(config, moe),
        ),
    )


def _mlp_spec(config: TransformerConfig, provider: BackendSpecProvider, moe: bool) -> Any:
    if not moe:
        return get_mlp_module_spec_for_backend(provider)
    return get_mlp_module_spec_for_backend(
        provider, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )


def _fused_names(config: TransformerConfig, moe: bool) -> dict[str, str]:
    """Return the names under which Transformer Engine's layers save the norms that are separate here."""
    names = {} if moe else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if not config.multi_latent_attention:
        return {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"} | names
    if config.qk_layernorm:
        for kind in ("q", "kv"):
            names[f"self_attention.{kind}_layernorm."] = (
                f"self_attention.linear_{kind}_up_proj.layer_norm_"
            )
    return names


def _attention_spec(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    qk_norm = provider.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    if config.qk_l2_norm:
        qk_norm = L2Norm
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent_attention(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    linear = provider.column_parallel_linear()
    norm = provider.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    q_lora_rank = getattr(config, "q_lora_rank", None)
    return ModuleSpec(
        module=TorchLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            linear_q_down_proj=linear,
            linear_q_up_proj=linear,
            linear_kv_down_proj=linear,
            linear_kv_up_proj=linear,
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norm if q_lora_rank is not None else IdentityOp,
            kv_layernorm=norm,
        ),
    )


class DisabledSetting(NamedTuple):
    """A setting that this machine does not support, and the value that replaces it."""

    field: str
    asked: object
    used: object
    reason: str


_WITHOUT_EXTENSIONS = {
    "apply_rope_fusion": "it needs Transformer Engine",
    "moe_permute_fusion": "it needs Transformer Engine",
    "moe_router_fusion": "it needs Transformer Engine",
    "tp_comm_overlap": "it needs Transformer Engine",
    "fused_residual_rmsnorm": "it needs Transformer Engine",
    "memory_efficient_layer_norm": "it needs Apex or Transformer Engine",
    "persist_layer_norm": "it needs Apex",
}
_WITHOUT_CUDA = {
    "masked_softmax_fusion": "it is a CUDA kernel",
    "bias_dropout_fusion": "it is compiled for CUDA",
}


_Use = Callable[[str, object, str], None]  # sets a field to a value for a reason


def apply_backend_settings(
    config: TransformerConfig, backend: str = "torch"
) -> list[DisabledSetting]:
    """Choose the kernels that ``backend`` supports here, and return the changes of values from the user."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changes: list[DisabledSetting] = []

    def use(field: str, value: object, reason: str) -> None:
        asked = getattr(config, field)
        if asked == value:
            return
        setattr(config, field, value)
        if asked != defaults[field]:
            changes.append(DisabledSetting(field, asked, value, reason))

    if not tensor_parallel_layers._grad_accum_fusion_available:
        # also with Transformer Engine: the output layer is Megatron-Core's own, and raises an error
        use("gradient_accumulation_fusion", False, "it needs Apex's fused_weight_gradient_mlp_cuda")
    if backend == "transformer_engine":
        if config.num_moe_experts is not None and moe_utils.fused_permute is not None:
            use("moe_permute_fusion", True, "Transformer Engine permutes tokens in one kernel")
        _use_compiled_kernels(config, use)
        return changes
    for field, reason in _WITHOUT_EXTENSIONS.items():
        use(field, False, reason)
    if has_cuda():
        _use_compiled_kernels(config, use)
    else:
        _use_cpu_kernels(config, use)
    return changes


def _use_compiled_kernels(config: TransformerConfig, use: _Use) -> None:
    """Enable compiled GPU kernels; those of Transformer Engine only if the config asks for them."""
    reason = compiler.why_not_compiled()
    if reason is not None:
        use("bias_activation_fusion", False, reason)
    elif eager.fuses_activation(config):  # Megatron-Core's SwiGLU, compiled at the first call
        use("bias_activation_fusion", True, "SwiGLU is compiled")
    compiled.install()


def _use_cpu_kernels(config: TransformerConfig, use: _Use) -> None:
    for field, reason in _WITHOUT_CUDA.items():
        use(field, False, reason)
    if (
        config.moe_token_dispatcher_type == "flex"
    ):  # for plans of runs on GPUs: a run here is refused
        use("moe_token_dispatcher_type", "alltoall", "there is no CUDA")
    use("cuda_graph_impl", "none", "there is no CUDA")
    fuses = eager.fuses_activation(config)
    use("bias_activation_fusion", fuses, "only SwiGLU of dense layers has a fused form on CPUs")
    eager.install()
    use("use_cpu_initialization", True, "there is no CUDA")


def heterogeneous_layer(plain: ModuleSpec, block: TransformerBlockConfig) -> ModuleSpec:
    """Select the parts of ``plain`` that ``block`` describes; the config of each layer has their sizes."""
    edits: dict[str, Any] = {}
    parts: Any = plain.submodules
    names: dict[str, str] = dict(parts.sharded_state_dict_keys_map)
    if block.attention.no_op:
        edits |= {
            "self_attention": ModuleSpec(module=IdentityOp),
            **_left_out("input_layernorm", "self_attn_bda"),
        }
    elif block.attention.replace_with_linear:
        edits["self_attention"] = ModuleSpec(module=LinearReplacement)
        names["input_layernorm."] = "self_attention.layer_norm_"
    if block.mlp.no_op:
        edits |= {"mlp": IdentityOp, **_left_out("pre_mlp_layernorm", "mlp_bda")}
    elif block.mlp.replace_with_linear:
        edits["mlp"] = partial(LinearReplacement)
        names["pre_mlp_layernorm."] = "mlp.layer_norm_"
    edits["sharded_state_dict_keys_map"] = names
    return dataclasses.replace(plain, submodules=dataclasses.replace(parts, **edits))


def _left_out(norm: str, residual: str) -> dict[str, Any]:
    """Neither normalizes nor adds to the residual stream."""
    return {norm: IdentityOp, residual: IdentityFuncOp}


class LinearReplacement(ColumnParallelLinear):
    """A linear layer that replaces attention or a feed-forward layer, with the same interface.

    ``ColumnParallelLinearGathered`` of Megatron-Core 0.19 pads the sequence instead of the features, so it fails
    under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        assert config.init_method is not None, "Megatron-Core derives init_method"
        width = config.hidden_size
        super().__init__(
            width, width, config=config, init_method=config.init_method, bias=config.add_bias_linear
        )

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map [s, b, hidden] to the same shape; there is no bias."""
        out = gather_from_tensor_model_parallel_region(super().forward(x)[0], group=self.tp_group)
        if self.config.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out, None
