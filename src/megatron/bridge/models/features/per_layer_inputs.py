# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings (PLE): an additional input of each layer (Gemma 4).

A per-layer embedding and a normed projection of the token's usual embedding are added for all layers at once. After the
feed-forward layer, a layer gates its part by the residual stream, and adds a projection of the result. Each
tensor-parallel rank computes this for its own tokens; only the embedding table is sharded.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron.bridge.backends.kernels.norms import TorchNorm, replicated
from megatron.bridge.utils.errors import UserError


class ReplicatedLinear(nn.Module):
    """A linear layer without a bias that is whole on every rank."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = replicated(config, outputs, inputs)
        if config.perform_initialization:
            config.init_method(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class PerLayerInputs(MegatronModule):
    """The inputs of all layers, [s, b, layers, width], from token ids [b, s] and embeddings [s, b, hidden]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.width, ranks = config.hidden_size_per_layer_input, config.tensor_model_parallel_size
        rows, outputs = (
            -(-config.vocab_size_per_layer_input // ranks) * ranks,
            config.num_layers * self.width,
        )
        by_rank = {"reduce_scatter_embeddings": config.sequence_parallel, "config": config}
        self.word_embeddings = VocabParallelEmbedding(
            rows, outputs, init_method=config.init_method, **by_rank
        )
        self.projection = ReplicatedLinear(config, config.hidden_size, outputs)
        self.norm = TorchNorm(config, self.width, config.layernorm_epsilon)
        with torch.device(
            "cpu"
        ):  # a number, in the precision of training, even while the model is on the meta device
            self.scale = torch.tensor(self.width**0.5, dtype=config.params_dtype).item()

    def forward(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        width = self.width
        token_inputs = self.word_embeddings(ids)
        token_inputs = (
            token_inputs if self.config.sequence_parallel else token_inputs.transpose(0, 1)
        )
        token_inputs = token_inputs * self.scale
        projected = self.projection(embeddings) * self.config.hidden_size**-0.5
        return (
            self.norm(projected.unflatten(-1, (-1, width)))
            + token_inputs.unflatten(-1, (-1, width))
        ) * 2**-0.5


class PerLayerGate(nn.Module):
    """A layer's addition to the residual stream, computed from the stream and the layer's part of the inputs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.activation = config.activation_func
        self.gate = ReplicatedLinear(config, config.hidden_size, config.hidden_size_per_layer_input)
        self.projection = ReplicatedLinear(
            config, config.hidden_size_per_layer_input, config.hidden_size
        )
        self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, stream: Tensor, layer_input: Tensor) -> Tensor:
        return self.norm(self.projection(self.activation(self.gate(stream)) * layer_input))


_GIVEN = ("hidden_size_per_layer_input", "shared_kv_layers")
_AROUND = (*_GIVEN, "layer_scales", "experts_beside_mlp")
_REFUSED = {
    ("recompute_granularity", "full"): (
        _GIVEN,
        "layers computed again would lose gradients of it; use 'selective'",
    ),
    ("cuda_graph_impl", "local"): (_AROUND, "graphs of layers leave it out; use 'full_iteration'"),
    ("overlap_moe_expert_parallel_comm", True): (
        _AROUND,
        "it runs parts of layers without it; switch it off",
    ),
    ("fused_single_qkv_rope", True): (
        ("value_norm",),
        "values are normed before they are joined; switch it off",
    ),
}


def check(config: Any) -> None:
    """Refuse features that run layers, or parts of them, without the inputs from other modules."""
    for (setting, value), (features, why) in _REFUSED.items():
        used = next((name for name in features if getattr(config, name)), None)
        if used and getattr(config, setting) == value:
            raise UserError(
                f"{setting}={value!r} does not work with {used}={getattr(config, used)}: {why}"
            )
    width, stages = config.hidden_size_per_layer_input, config.pipeline_model_parallel_size
    if width and stages > 1:
        raise UserError(
            f"pipeline_model_parallel_size={stages} does not work with hidden_size_per_layer_input={width}: the "
            f"first stage would have to send {config.num_layers * width} more numbers for each token; use 1"
        )
    if config.experts_beside_mlp and "moe" in (config.recompute_modules or ()):
        raise UserError(
            "recompute_modules=['moe'] does not work with experts_beside_mlp=True: remove 'moe'"
        )


def apply_layer_ends(model: nn.Module, config: Any) -> None:
    """Add per-layer inputs and scales to the layers of ``model`` (a ``GPTModel``)."""
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if config.layer_scales:
        for layer in layers:
            device = next(layer.parameters()).device
            layer.register_buffer(
                "layer_scale", torch.ones(1, dtype=config.params_dtype, device=device)
            )
    if config.hidden_size_per_layer_input:
        _add_inputs(model, layers, config)
    if config.layer_scales or config.hidden_size_per_layer_input:
        for layer in layers:
            layer.register_forward_hook(_finish_layer)


def _add_inputs(model: Any, layers: list[TransformerLayer], config: Any) -> None:
    model.per_layer_inputs = PerLayerInputs(config)

    def compute(_: nn.Module, args: Any, kwargs: dict[str, Any], embeddings: Tensor) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for layer, layer_input in zip(
            layers, model.per_layer_inputs(ids, embeddings).unbind(-2), strict=True
        ):
            layer.own_input = layer_input

    for layer in layers:
        layer.per_layer_gate = PerLayerGate(config)
    model.embedding.register_forward_hook(compute, with_kwargs=True)


def _finish_layer(layer: Any, _: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    stream, context = outputs
    if hasattr(layer, "per_layer_gate"):
        layer_input, layer.own_input = layer.own_input, None
        stream = stream + layer.per_layer_gate(stream, layer_input)
    return (stream * layer.layer_scale if hasattr(layer, "layer_scale") else stream), context
