# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that are not trained: ``train.frozen``."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch.nn import Parameter

from megatron.bridge.models.conversion.plan import global_name
from megatron.bridge.utils.dist import all_gather_object, is_initialized
from megatron.bridge.utils.errors import UserError, did_you_mean

Hook = Callable[[list[MegatronModule]], Any]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def freezing_hook(patterns: list[str], first: Hook | None = None) -> Hook | None:
    """A hook of ``provide_distributed_model`` that stops training what ``patterns`` name; None if they are empty.

    Args:
        patterns: Megatron's names of parameters, with ``*`` for any characters and layers counted from 0 through
            the whole model. A tied output layer goes with its embedding.
        first: a hook to call before, such as the one that adds adapters.

    Raises:
        UserError: when the model is built, a pattern names nothing that is trained on any rank, or everything is
            named.
    """
    if not patterns:
        return first

    def hook(model: list[MegatronModule]) -> Any:
        chunks = (first(model) if first is not None else None) or model
        trained = [(name, parameter) for name, parameter in named_parameters(chunks) if parameter.requires_grad]
        for name, parameter in trained:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                parameter.requires_grad_(False)
        _check(patterns, [name for name, _ in trained], any(p.requires_grad for _, p in trained))
        return chunks

    hook.__dict__.update(getattr(first, "__dict__", {}))
    return hook


def named_parameters(chunks: list[MegatronModule]) -> Iterator[tuple[str, Parameter]]:
    """Parameters by their names in the whole model."""
    for chunk in chunks:
        tied = getattr(chunk, "share_embeddings_and_output_weights", False)
        for local, parameter in chunk.named_parameters():
            name = global_name(chunk, local)
            # on a pipeline stage of its own, a tied output layer is a copy that must stay equal
            yield (EMBEDDING if tied and name == OUTPUT else name), parameter


def _check(patterns: list[str], mine: list[str], trained: bool) -> None:
    found = all_gather_object((mine, trained)) if is_initialized() else [(mine, trained)]
    names = sorted({name for part, _ in found for name in part})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"train.frozen: the pattern {pattern} names no parameter that is trained"
                f"{did_you_mean(pattern, names)}"
            )
    if not all(part for _, part in found):
        raise UserError(
            f"train.frozen={','.join(patterns)} leaves nothing to train on a pipeline stage: freeze less, or use "
            f"fewer stages"
        )
