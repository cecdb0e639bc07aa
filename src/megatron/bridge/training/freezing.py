# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that are not trained."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.utils.dist import all_gather_object, is_initialized
from megatron.bridge.utils.errors import UserError, did_you_mean

Hook = Callable[[list[MegatronModule]], None]


def freeze(*patterns: str) -> Hook:
    """A hook for ``config.model.register_pre_wrap_hook`` that stops training what the patterns name.

    Example:
        >>> hook = freeze("embedding.*", "decoder.layers.*.self_attention.*")

    Args:
        patterns: Megatron's names of parameters, with ``*`` for any characters. Layers are counted within a
            pipeline stage, as Megatron-Core does.

    Raises:
        UserError: when the model is built, a pattern names nothing on any rank, or everything is named.
    """

    def hook(model: list[MegatronModule]) -> None:
        names = [name for chunk in model for name, _ in chunk.named_parameters()]
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if any(fnmatchcase(name, pattern) for pattern in patterns):
                    parameter.requires_grad_(False)
        trained = any(parameter.requires_grad for chunk in model for parameter in chunk.parameters())
        _check(patterns, names, trained)

    return hook


def _check(patterns: tuple[str, ...], mine: list[str], trained: bool) -> None:
    found = all_gather_object((mine, trained)) if is_initialized() else [(mine, trained)]
    names = sorted({name for part, _ in found for name in part})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"freeze: the pattern {pattern} names no parameter{did_you_mean(pattern, names)}")
    if not all(part for _, part in found):
        raise UserError(
            f"freeze: {', '.join(patterns)} leave nothing to train on a pipeline stage: freeze less, or use "
            f"fewer stages"
        )
