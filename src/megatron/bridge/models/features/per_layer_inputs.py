# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings (PLE): an additional input of each layer (Gemma 4).

A per-layer embedding and a normed projection of the token's usual embedding are added for all layers at once. After the
feed-forward layer, a layer gates its part by the residual stream, and adds a projection of the result. Each
tensor-parallel rank computes this for its own tokens; only the embedding table is sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron.bridge.backends.kernels.norms import TorchNorm, replicated
from megatron.bridge.models.features.feature import (
    RECOMPUTED_LAYERS,
    WITHOUT_WHOLE_LAYERS,
    LayerFeature,
    ToySizes,
    clashes,
)
from megatron.bridge.utils.config.ranges import AT_LEAST_ONE


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
    """The inputs of all layers, [s, b, layers, width], from token ids [b, s] and embeddings [s, b, hidden].

    Attributes:
        layers: the layers, which take their inputs from ``own_input``.
        is_deferred: whether ``give_to_layers`` is called once features of images are in the embeddings.
    """

    def __init__(self, config: Any, layers: list[TransformerLayer]) -> None:
        super().__init__(config)
        vars(self)["layers"] = layers  # they are no submodules
        self.is_deferred = False
        self.width = config.hidden_size_per_layer_input
        ranks = config.tensor_model_parallel_size
        rows = -(-config.vocab_size_per_layer_input // ranks) * ranks
        outputs = config.num_layers * self.width
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

    def give_to_layers(self, ids: Tensor, embeddings: Tensor) -> None:
        """Compute the inputs of all layers, and keep each until its layer runs."""
        for layer, layer_input in zip(
            vars(self)["layers"], self(ids, embeddings).unbind(-2), strict=True
        ):
            layer.own_input = layer_input

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Leave ``give_to_layers`` to the caller instead of calling it after the embedding."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False


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


@dataclass
class PerLayerInputFields:
    hidden_size_per_layer_input: Annotated[int | None, AT_LEAST_ONE] = None
    """Width of per-layer embeddings (PLE), a further embedding of each token for each layer; None disables them."""
    vocab_size_per_layer_input: Annotated[int | None, AT_LEAST_ONE] = None
    """Tokens that have per-layer embeddings."""


class PerLayerInputFeature(LayerFeature):
    switches = {"hidden_size_per_layer_input": None}
    plain_layers_only = True
    needs = {"vocab_size_per_layer_input": "hidden_size_per_layer_input"}
    pricing = {"hidden_size_per_layer_input": "modules", "vocab_size_per_layer_input": "modules"}

    def check(self, config: Any) -> Iterator[str]:
        switch = "hidden_size_per_layer_input"
        yield from clashes(config, switch, (RECOMPUTED_LAYERS, *WITHOUT_WHOLE_LAYERS))
        width = config.hidden_size_per_layer_input
        stages = config.pipeline_model_parallel_size
        if width and stages > 1:
            yield (
                f"pipeline_model_parallel_size={stages} does not work with {switch}={width}: the "
                f"first stage would have to send {config.num_layers * width} more numbers for each token; use 1"
            )

    def change_model(self, model: Any, config: Any) -> None:
        if not config.hidden_size_per_layer_input:
            return
        layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
        model.per_layer_inputs = PerLayerInputs(config, layers)

        def compute(_: nn.Module, args: Any, kwargs: dict[str, Any], embeddings: Tensor) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            if not model.per_layer_inputs.is_deferred:
                model.per_layer_inputs.give_to_layers(ids, embeddings)

        for layer in layers:
            layer.per_layer_gate = PerLayerGate(config)
            layer.register_forward_hook(_add_gated_input)
        model.embedding.register_forward_hook(compute, with_kwargs=True)

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        if not config.hidden_size_per_layer_input:
            return {}
        sizes = {"hidden_size_per_layer_input": toy.head_dim}
        if config.vocab_size_per_layer_input:
            sizes["vocab_size_per_layer_input"] = toy.vocab_size
        return sizes


def _add_gated_input(layer: Any, _: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    stream, context = outputs
    layer_input = layer.own_input
    layer.own_input = None
    return stream + layer.per_layer_gate(stream, layer_input), context
