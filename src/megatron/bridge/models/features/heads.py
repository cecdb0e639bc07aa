# SPDX-License-Identifier: Apache-2.0
"""Heads that replace the output layer: class scores, or the hidden states themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Annotated, Any, Literal

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.utils.config.ranges import AT_LEAST_ONE, AT_LEAST_ZERO, Range
from megatron.bridge.utils.errors import UserError

HeadName = Literal["sequence_classification", "token_classification", "embedding"]
Pooling = Literal["last_token", "mean"]
HAS_BIAS = {"sequence_classification": False, "token_classification": True}
"""The heads with scores, and whether transformers gives them a bias."""
_FIRST_WEIGHTS_SEED = 1234


class LinearForLastLayer(nn.Linear):
    """A head that maps hidden states [sequence, batch, hidden], gathered, to values in fp32."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        sequence_parallel: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(input_size, output_size, bias=bias)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """(values [sequence, batch, output_size], no bias); the other arguments are those of an output layer."""
        del weight, runtime_gather_output
        values = super().forward(input_.to(self.weight.dtype)).float()
        return (_whole_sequence(values) if self.sequence_parallel else values), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The parameters, whole on every rank."""
        del metadata
        return make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters()), prefix, sharded_offsets=sharded_offsets
        )


class HiddenStates(nn.Module):
    """The head of an embedding model: returns hidden states [sequence, batch, hidden], gathered, in fp32."""

    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """(states [sequence, batch, hidden], no bias); the other arguments are those of an output layer."""
        del weight, runtime_gather_output
        states = input_.float()
        return (_whole_sequence(states) if self.sequence_parallel else states), None


def _whole_sequence(values: Tensor) -> Tensor:
    return tensor_parallel.gather_from_sequence_parallel_region(
        values, tensor_parallel_output_grad=False
    )


@dataclass
class HeadFields:
    head: HeadName | None = None
    """What stands in the place of the output layer: a linear layer that scores ``num_labels`` classes from the
    last token (``sequence_classification``; with one label, a reward model) or for each token
    (``token_classification``), or nothing, so that the hidden states are the output (``embedding``)."""
    num_labels: Annotated[int | None, AT_LEAST_ONE] = None
    """Classes of a classification head."""
    label_names: list[str] | None = None
    """Their names, for ``id2label`` of an export; None takes the dataset's, or keeps those of the source."""
    pooling: Pooling = "last_token"
    """How training with ``head='embedding'`` makes one vector of a text."""
    contrastive_temperature: float = 0.05
    """Divides the similarities of embeddings in the contrastive loss."""
    hard_negatives: Annotated[int, AT_LEAST_ZERO] = 0
    """Texts of each record that do not fit its query; 0 takes ``dataset.negatives``."""
    gather_negatives: bool = False
    """Compare a query with the texts of all data-parallel ranks, not only with those of its own."""
    matryoshka_dims: Annotated[list[int] | None, Range(least=1, of_items=True)] = None
    """Train the beginnings of embeddings, too: the contrastive loss is the sum of those of these sizes."""
    matryoshka_weights: list[float] | None = None
    """Factors of these losses; None is 1 for each."""


class HeadFeature(LayerFeature):
    switches = {"head": None}
    prefixes = (
        "num_labels",
        "label_names",
        "pooling",
        "contrastive_temperature",
        "hard_negatives",
        "gather_negatives",
        "matryoshka_",
    )
    prefix_switch = "head"
    pricing = {
        "head": "modules",
        "num_labels": "modules",
        "label_names": "numbers",
        "pooling": "numbers",
        "contrastive_temperature": "numbers",
        "hard_negatives": "numbers",
        "gather_negatives": "numbers",
        "matryoshka_dims": "numbers",
        "matryoshka_weights": "numbers",
    }

    def check(self, config: Any) -> Iterator[str]:
        if config.head is None:
            return _settings_without_head(config)
        return _settings_without_support(config)

    def derive(self, config: Any) -> None:
        """Untie the output layer, which does not exist."""
        if config.head is not None:
            config.share_embeddings_and_output_weights = False

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_head(model, config)


def _settings_without_support(config: Any) -> Iterator[str]:
    if config.head in HAS_BIAS and (config.num_labels is None or config.num_labels < 1):
        yield (
            f"model.head={config.head} needs model.num_labels, which is {config.num_labels}: set the number of "
            "classes, 1 for a reward model"
        )
    if config.head == "embedding" and config.num_labels is not None:
        yield f"model.num_labels={config.num_labels} has no effect with model.head=embedding: unset it"
    if config.label_names is not None and len(config.label_names) != config.num_labels:
        yield (
            f"model.label_names has {len(config.label_names)} names, and model.num_labels is {config.num_labels}: "
            "name each class"
        )
    yield from _matryoshka_problems(config)
    for name in ("mtp_num_layers", "use_mup", "vision"):
        if value := getattr(config, name, None):
            shown = value if isinstance(value, int) else "..."
            yield f"model.head={config.head} does not go with model.{name}={shown}: unset one of them"


def _matryoshka_problems(config: Any) -> Iterator[str]:
    dims: list[int] = config.matryoshka_dims or []
    weights = config.matryoshka_weights
    if (dims or config.gather_negatives) and config.head != "embedding":
        yield (
            f"model.matryoshka_dims={dims} and model.gather_negatives={config.gather_negatives} are for "
            f"model.head=embedding, which is {config.head}: unset them"
        )
    if any(size > config.hidden_size for size in dims) or len(set(dims)) != len(dims):
        yield (
            f"model.matryoshka_dims={dims}: give different sizes up to model.hidden_size={config.hidden_size}"
        )
    if weights is not None and (len(weights) != len(dims) or not all(w > 0 for w in weights)):
        yield (
            f"model.matryoshka_weights={weights} with model.matryoshka_dims={dims}: give a factor above 0 for "
            "each size"
        )


def _settings_without_head(config: Any) -> Iterator[str]:
    for name, unset in (
        ("num_labels", None),
        ("label_names", None),
        ("pooling", "last_token"),
        ("contrastive_temperature", 0.05),
        ("hard_negatives", 0),
        ("gather_negatives", False),
        ("matryoshka_dims", None),
        ("matryoshka_weights", None),
    ):
        if (value := getattr(config, name)) != unset:
            yield f"model.{name}={value} has no effect without model.head: set model.head"


def apply_head(model: nn.Module, config: Any) -> None:
    """Replace the output layer of a built chunk with the head that ``config`` declares.

    New weights are normal with ``init_method_std``, and the same under every parallel layout.
    """
    if config.head is None or not getattr(model, "post_process", False):
        return
    like = next(model.parameters())
    if config.head == "embedding":
        model.output_layer = HiddenStates(config.sequence_parallel)
        # a bound method and not a closure, so that copies of the model describe themselves
        describe: Any = MethodType(_sharded_state_without_output_layer, model)
        model.sharded_state_dict = describe
    else:
        model.output_layer = _linear_head(config).to(device=like.device, dtype=like.dtype)
    model.compute_language_model_loss = _no_language_model_loss  # type: ignore[assignment]


def _sharded_state_without_output_layer(
    model: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
) -> dict[str, Any]:
    """Return the sharded state of an embedding model.

    Megatron-Core describes the weight of the output layer on the last stage, where this model has none.
    """
    model.post_process = False
    try:
        return type(model).sharded_state_dict(model, prefix, sharded_offsets, metadata)
    finally:
        model.post_process = True


@torch.no_grad()
def _linear_head(config: Any) -> LinearForLastLayer:
    sizes = (config.hidden_size, config.num_labels)
    with torch.device("cpu"):
        head = LinearForLastLayer(
            *sizes, sequence_parallel=config.sequence_parallel, bias=HAS_BIAS[config.head]
        ).float()
        generator = torch.Generator().manual_seed(_FIRST_WEIGHTS_SEED)
        head.weight.normal_(std=config.init_method_std, generator=generator)
    if head.bias is not None:  # pyright: ignore[reportUnnecessaryComparison] - a head may have none
        head.bias.zero_()
    return head


def _no_language_model_loss(*_: Any, **__: Any) -> Tensor:
    raise UserError(
        "a model with model.head has no language-model loss: use megatron.bridge.training.head_step.forward_step, "
        "or call the model without labels"
    )
