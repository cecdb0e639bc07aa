# SPDX-License-Identifier: Apache-2.0
"""Norms, residuals and kinds of attention that Megatron-Core's layer specs lack, added to a spec of either backend.

These are switches of one layer that depend on each other. Other features of layers are in ``models.features``.

A provider declares them in these fields:

* ``norm_placement``: norms before attention and MLP (``pre``), after them (``post``), or both (``both``).
* ``residual_multiplier``: scales the outputs of attention and MLP before they are added to the residual stream.
* ``qk_norm_across_heads``: queries and keys are normalized over the width of all heads together.
* ``parallel_residual``: attention and MLP both read the input of the layer, and both outputs are added to it.
* ``qk_norm_by_head``: a LayerNorm of queries and keys with a separate gain for each head.
* ``qk_norm_after_rope``: queries and keys are normalized after the rotary embedding.
* ``attn_logit_softcapping`` and ``chunked_attention``: Transformer Engine supports neither, so its layers use the
  attention of the torch backend.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.backends.kernels.norms import AcrossHeadsNorm, ByHeadNorm, HeadsNorm
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from megatron.bridge.utils.errors import UserError

NormPlacement = Literal["pre", "post", "both"]

ParallelResidual = Literal["shared_norm", "own_norms"]

OFF: dict[str, Any] = {
    "norm_placement": "pre",
    "qk_norm_across_heads": False,
    "qk_norm_by_head": False,
    "qk_norm_after_rope": False,
    "parallel_residual": None,
    "residual_multiplier": 1.0,
    "attn_logit_softcapping": None,
    "chunked_attention": False,
}
"""Field of a feature -> value for a plain layer."""

Residual = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def add_features(
    block: TransformerBlockSubmodules, config: TransformerConfig, provider: BackendSpecProvider
) -> TransformerBlockSubmodules:
    """Add the features that ``config`` declares to each layer of a stage, which was made for ``provider``."""
    _check(config, provider)
    layers = [_with_features(spec, config, provider) for spec in block.layer_specs or []]
    return dataclasses.replace(block, layer_specs=layers)


def _check(config: TransformerConfig, provider: BackendSpecProvider) -> None:
    placement = getattr(config, "norm_placement", "pre")
    if placement not in get_args(NormPlacement):
        raise UserError(
            f"norm_placement={placement!r}: choose one of {', '.join(get_args(NormPlacement))}"
        )
    _check_parallel_residual(config, placement)
    _check_norms(config, provider)
    across, by_head, late = (getattr(config, f"qk_norm_{name}", False) for name in _QK_NORMS)
    if by_head and (across or late or config.qk_layernorm):
        raise UserError(
            "qk_norm_by_head=True excludes the other norms of queries and keys: set only one"
        )
    if late and not config.qk_layernorm:
        raise UserError(
            "qk_norm_after_rope=True has no norms to apply: set model.qk_layernorm=True"
        )
    if across and (config.qk_layernorm or config.qk_l2_norm or config.multi_latent_attention):
        raise UserError(
            "qk_norm_across_heads=True excludes qk_layernorm, qk_l2_norm and multi_latent_attention: set only one"
        )
    groups = config.num_query_groups or config.num_attention_heads
    ranks = config.tensor_model_parallel_size
    if (across or by_head) and groups < ranks:
        raise UserError(
            f"qk_norm_{'across_heads' if across else 'by_head'}=True cannot split num_query_groups={groups} over "
            f"tensor_model_parallel_size={ranks} ranks: set model.make_query_groups_divisible_by={ranks}"
        )


_QK_NORMS = ("across_heads", "by_head", "after_rope")


def _check_parallel_residual(config: TransformerConfig, placement: str) -> None:
    parallel = getattr(config, "parallel_residual", None)
    if parallel not in (None, *get_args(ParallelResidual)):
        raise UserError(
            f"parallel_residual={parallel!r}: choose one of {', '.join(get_args(ParallelResidual))}, or None"
        )
    if parallel and placement != "pre":
        raise UserError(
            f"parallel_residual={parallel!r} excludes norm_placement={placement!r}: set model.norm_placement='pre'"
        )


def _check_norms(config: TransformerConfig, provider: BackendSpecProvider) -> None:
    if isinstance(provider, TorchSpecProvider):
        return
    for name, part in (
        ("layernorm_bias", "LayerNorm has a bias"),
        ("norm_gain", "norms have a gain"),
    ):
        if not getattr(config, name, True):
            raise UserError(
                f"{name}=False does not work with backend='transformer_engine', whose {part}: set model.backend='torch'"
            )


def _with_features(
    spec: ModuleSpec, config: TransformerConfig, provider: BackendSpecProvider
) -> ModuleSpec:
    layer = spec.submodules
    assert isinstance(layer, TransformerLayerSubmodules), spec
    edits: dict[str, Any] = {"self_attention": _edit_attention(layer.self_attention, config)}
    parallel = getattr(config, "parallel_residual", None)
    if parallel == "shared_norm":
        edits |= _with_one_norm(dataclasses.replace(layer, **edits), provider)
    if parallel:
        spec = dataclasses.replace(spec, module=_PARALLEL_LAYERS[parallel])
    placement = getattr(config, "norm_placement", "pre")
    if placement == "post":
        edits |= _without_norms(dataclasses.replace(layer, **edits), provider)
    scale = getattr(config, "residual_multiplier", 1.0)
    if placement != "pre" or scale != 1.0:
        norm = None if placement == "pre" else provider.layer_norm()
        add = ModuleSpec(
            module=ResidualAdd, params={"config": config, "norm": norm, "scale": scale}
        )
        edits |= {"self_attn_bda": add, "mlp_bda": add}
    return dataclasses.replace(spec, submodules=dataclasses.replace(layer, **edits))


def use_torch_attention(attention: Any) -> Any:
    """Return the spec of attention with the core attention of the torch backend."""
    submodules = dataclasses.replace(attention.submodules, core_attention=TorchAttention)
    return dataclasses.replace(attention, submodules=submodules)


def with_torch_attention(spec: Any) -> Any:
    """Return the spec of a layer whose core attention is that of the torch backend."""
    layer = spec.submodules
    attention = use_torch_attention(layer.self_attention)
    return dataclasses.replace(
        spec, submodules=dataclasses.replace(layer, self_attention=attention)
    )


def _edit_attention(spec: Any, config: TransformerConfig) -> Any:
    if getattr(config, "attn_logit_softcapping", None) is not None or getattr(
        config, "chunked_attention", False
    ):
        spec = use_torch_attention(spec)
    if getattr(config, "qk_norm_across_heads", False):
        spec = dataclasses.replace(spec, module=AcrossHeadsNormAttention)
    if getattr(config, "qk_norm_by_head", False):
        spec = dataclasses.replace(spec, module=ByHeadNormAttention)
    if getattr(config, "qk_norm_after_rope", False):
        spec = dataclasses.replace(spec, module=LateNormAttention)
    return spec


def _with_one_norm(
    layer: TransformerLayerSubmodules, provider: BackendSpecProvider
) -> dict[str, Any]:
    """Edit a layer spec: use one separate norm for attention and MLP."""
    edits = _without_norms(layer, provider)
    return {**edits, "input_layernorm": provider.layer_norm(), "sharded_state_dict_keys_map": {}}


def _without_norms(
    layer: TransformerLayerSubmodules, provider: BackendSpecProvider
) -> dict[str, Any]:
    """Edit a layer spec: remove the norms before attention and MLP, also if they are fused into a linear layer."""
    column = provider.column_parallel_linear()
    attention: Any = layer.self_attention
    edits: dict[str, Any] = {"input_layernorm": IdentityOp, "pre_mlp_layernorm": IdentityOp}
    submodules = dataclasses.replace(attention.submodules, linear_qkv=column)
    edits["self_attention"] = dataclasses.replace(attention, submodules=submodules)
    assert isinstance(layer.mlp, partial)
    parts = layer.mlp.keywords["submodules"]
    if hasattr(parts, "linear_fc1"):  # a dense layer: experts have no fused norm
        edits["mlp"] = partial(layer.mlp, submodules=dataclasses.replace(parts, linear_fc1=column))
    return edits


class ResidualAdd(torch.nn.Module):
    """Normalizes and scales the output of attention or MLP and adds it to the residual stream.

    It replaces Megatron-Core's ``bias_dropout_add`` and has the same interface.

    ``norm`` builds the norm of the output (None: no norm); ``scale`` multiplies the normalized output.
    """

    def __init__(self, config: TransformerConfig, norm: Any, scale: float) -> None:
        super().__init__()
        self.norm = norm and norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.scale = scale

    def forward(self, training: bool, fused: bool) -> Residual:
        """Return a function ((output, bias), residual, dropout) -> new residual stream, all [s, b, h]."""
        add = get_bias_dropout_add(training, fused)

        def to_residual(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            x, bias = output
            x = x if bias is None else x + bias
            x = x if self.norm is None else self.norm(x)
            return add((x if self.scale == 1.0 else x * self.scale, None), residual, dropout)

        return to_residual


class ParallelResidualLayer(TransformerLayer):
    """A decoder layer whose attention and MLP read the same input: x + attention(norm(x)) + mlp(own_norm(x)).

    Megatron-Core lets the norm before the MLP return the residual stream with its output; here the norm reads
    the input of the layer, and the stream already holds the output of attention.
    """

    _input: torch.Tensor | None = None

    def _forward_attention(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._input = hidden_states
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> Any:
        given = self._input
        self._input = None
        assert given is not None, "attention comes before the MLP"
        return self._normed(given), hidden_states

    def _normed(self, given: torch.Tensor) -> Any:
        return super()._forward_pre_mlp_layernorm(given)


class SharedNormLayer(ParallelResidualLayer):
    """The same with one norm for both: x + attention(norm(x)) + mlp(norm(x))."""

    def _normed(self, given: torch.Tensor) -> Any:
        # recomputed, because with recomputed norms attention's copy of the output is already freed
        norm: Any = self.input_layernorm
        return norm(given)


_PARALLEL_LAYERS = {"own_norms": ParallelResidualLayer, "shared_norm": SharedNormLayer}


class HeadsNormAttention(SelfAttention):
    """Attention with norms of queries and keys whose gains are split like the heads, before the rotary embedding."""

    norm: ClassVar[type[HeadsNorm]]

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # not the spec's norms: these are per head, and their gradients are summed over tensor-parallel ranks
        super().__init__(
            config,
            dataclasses.replace(submodules, q_layernorm=None, k_layernorm=None),
            *args,
            **kwargs,
        )
        padded = (config.num_attention_heads, config.num_query_groups or config.num_attention_heads)
        for role, heads, true_heads in zip(
            "qk", padded, getattr(config, "unpadded_heads", padded), strict=True
        ):
            setattr(
                self,
                f"{role}_layernorm",
                self.norm(config, heads, true_heads, self.pg_collection.tp),
            )


class ByHeadNormAttention(HeadsNormAttention):
    """Attention with a LayerNorm of queries and keys that has a gain, and no bias, for each head."""

    norm = ByHeadNorm


class AcrossHeadsNormAttention(HeadsNormAttention):
    """Attention with queries and keys normalized over all heads together."""

    norm = AcrossHeadsNorm


def mark_sinks(model: torch.nn.Module) -> None:
    """Mark attention sinks as sharded over tensor-parallel ranks, which Transformer Engine's attention does not do.

    Otherwise conversion would use each rank's shard as the whole, and the gradient norm would count only one shard.
    """
    for module in model.modules():
        sinks = getattr(module, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter) and not hasattr(sinks, "tensor_model_parallel"):
            tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, 0, 1)


def keep_lengths_without_rope(model: torch.nn.Module, config: Any) -> None:
    """Under ``qk_l2_norm``, leave out the norms of layers that ``no_rope_freq`` leaves without rotary embedding."""
    if not (config.qk_l2_norm and config.no_rope_freq):
        return
    for module in model.modules():
        if isinstance(module, SelfAttention) and config.no_rope_freq[module.layer_number - 1]:
            module.q_layernorm = None
            module.k_layernorm = None


class LateNormAttention(SelfAttention):
    """Attention with queries and keys that are normalized after the rotary embedding.

    The names ``late_q_layernorm`` and ``late_k_layernorm`` contain ``q_layernorm`` and ``k_layernorm``, so that
    Megatron-Core sums the gradients of the norms over the tensor-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        for name in ("q_layernorm", "k_layernorm"):
            setattr(self, f"late_{name}", getattr(self, name))
            setattr(self, name, None)
        self.get_submodule("core_attention").register_forward_pre_hook(self._normalize)

    def _normalize(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, *other_inputs = inputs
        norms: Any = self.late_q_layernorm, self.late_k_layernorm
        return norms[0](query), norms[1](key), *other_inputs
