# SPDX-License-Identifier: Apache-2.0
"""Freeze parameters of a model: ``train.frozen``."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from megatron.core.transformer.module import MegatronModule
from torch.nn import Parameter

from megatron.bridge.models.conversion.engine.plan import global_name
from megatron.bridge.models.model_provider import PreWrapHook
from megatron.bridge.utils.distributed import all_gather_object
from megatron.bridge.utils.errors import UserError, did_you_mean

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def freezing_hook(patterns: list[str], first: PreWrapHook | None = None) -> PreWrapHook | None:
    """A hook of ``provide_distributed_model`` that calls ``first``, and freezes the parameters in ``patterns``.

    They are Megatron's parameter names, where ``*`` matches any characters and layers are numbered from 0 through
    the full model. A tied output layer is frozen with its embedding.
    """
    if not patterns:
        return first

    def freeze(chunks: list[MegatronModule]) -> None:
        trained = [
            (name, parameter)
            for name, parameter in named_parameters(chunks)
            if parameter.requires_grad
        ]
        for name, parameter in trained:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                parameter.requires_grad_(False)
        check_patterns("train.frozen", patterns, [name for name, _ in trained])
        if not all(all_gather_object(any(parameter.requires_grad for _, parameter in trained))):
            raise UserError(
                f"train.frozen={','.join(patterns)} leaves nothing to train on a pipeline stage: freeze fewer "
                "parameters, or use fewer stages"
            )

    return PreWrapHook(freeze) if first is None else first.then(freeze)


def named_parameters(chunks: list[MegatronModule]) -> Iterator[tuple[str, Parameter]]:
    for chunk in chunks:
        tied = getattr(chunk, "share_embeddings_and_output_weights", False)
        for local, parameter in chunk.named_parameters():
            name = global_name(chunk, local)
            # on another pipeline stage than the embedding, a tied output layer is a copy that must stay equal
            yield (EMBEDDING if tied and name == OUTPUT else name), parameter


def check_patterns(key: str, patterns: Iterable[str], trained: list[str]) -> None:
    """Refuse a pattern of ``key`` that matches no name of a trained parameter on any rank."""
    names = sorted({name for part in all_gather_object(trained) for name in part})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"{key}: the pattern {pattern} matches no trained parameter{did_you_mean(pattern, names)}"
            )
