# SPDX-License-Identifier: Apache-2.0
"""PEFT for programs with their own training loops: from a mapping of settings, by a hook, from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron.bridge.checkpoint import loading, model_io, paths
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.peft.base import PEFT, bare_chunks, let_gradients_start
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.checkpoint import set_trained_state, trained_state
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.vera import VeRA
from megatron.bridge.utils.errors import UserError, did_you_mean

_KINDS = {"lora": LoRA, "canonical_lora": CanonicalLoRA, "dora": DoRA, "vera": VeRA}
_NAMES = {"rank": "dim", "dtype": "lora_dtype"}
# what trainers keep in addition to the method's settings: they act on it themselves, or it concerns a vision tower
_OF_CALLERS = (
    "merge",
    "adapter_path",
    "freeze_vision_model",
    "freeze_vision_projection",
    "freeze_language_model",
)


def create_peft(config: Mapping[str, Any], dtype: torch.dtype | str | None = None) -> PEFT | None:
    """The method that a mapping describes; None if its rank is 0.

    Args:
        config: ``type`` (``lora``, ``canonical_lora``, ``dora`` or ``vera``), ``rank`` or ``dim``, and fields of the
            method. None and empty lists mean the default; ``merge``, ``adapter_path`` and
            ``freeze_*`` are the caller's own.
        dtype: of the model; refused when the method is applied to a model of another one.
    """
    values = {
        _NAMES.get(name, name): value for name, value in config.items() if name not in _OF_CALLERS
    }
    kind = str(values.pop("type", None) or "lora")
    if kind not in _KINDS:
        raise UserError(f"lora.type={kind}: use one of {', '.join(_KINDS)}")
    if (values.get("dim") or 0) <= 0:
        return None
    method = _KINDS[kind]
    known = [field.name for field in fields(method)]
    chosen = {name: value for name, value in values.items() if value not in (None, [], ())}
    for name, value in chosen.items():
        if name not in known:
            raise UserError(
                f"lora.{name}={value!r}: {method.__name__} has no such setting{did_you_mean(name, known)}"
            )
    return method(**{"lora_dtype": dtype, **chosen})


def create_peft_hook(peft: PEFT, training: bool = True) -> Callable[[Any], Any]:
    """A pre-wrap hook that applies ``peft`` and records the trained parameters."""

    def hook(model: Any) -> Any:
        adapted = peft(model, training=training)
        peft.set_params_to_save(adapted)
        return adapted

    return hook


def load_peft_adapter_checkpoint(
    model: Any, adapter_checkpoint_path: str | Path, peft: PEFT, strict: bool = False
) -> None:
    """Load the adapters of a model from a Megatron checkpoint.

    The path is a run, one of its checkpoints, or any ``torch_dist`` directory. ``strict`` has no effect: an adapter
    that is missing from the checkpoint is always an error.
    """
    del peft, strict
    chunks = bare_chunks(model)
    path = Path(adapter_checkpoint_path)
    directory = on_first_rank(
        lambda: path if (path / ".metadata").is_file() else paths.resolve(path)
    )
    state = trained_state(chunks, model_io.stored_metadata(loading.load_common(directory)))
    set_trained_state(chunks, loading.load(state, directory, known=model_io.BESIDE_WEIGHTS))


def enable_expert_parallel_grad_sync_in_finalize(model: Any) -> int:
    """Return how many adapter parameters the next function reduces over expert-parallel ranks: 0.

    Each expert has adapters of its own here, so no rank has a copy of those of another rank.
    """
    del model
    return 0


def finalize_model_grads_with_expert_adapter_sync(
    model: list[Any], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Reduce and scale the gradients of a step, as Megatron-Core's ``finalize_model_grads``.

    Args:
        model: All chunks of this rank, wrapped.
        num_tokens: Tokens in the loss of this rank; None with losses that are means.
        **options: Other arguments of Megatron-Core's function.
    """
    finalize_model_grads(model, num_tokens, **options)


def maybe_enable_recompute_inputs_grad(
    model: Any, peft_recompute_patched: set[int] | None = None
) -> set[int]:
    """Let gradients reach adapters in layers that are recomputed. ``PEFT`` does so for the config it sees.

    Call it if recomputation is turned on after the adapters were added.

    Args:
        model: A chunk or all chunks of this rank, adapted, wrapped or not.
        peft_recompute_patched: Chunks that were changed before, by ``id``.

    Returns:
        The set, with these chunks.
    """
    changed = set() if peft_recompute_patched is None else peft_recompute_patched
    for chunk in bare_chunks(model):
        if id(chunk) not in changed and chunk_info(chunk).peft is not None:
            let_gradients_start(chunk)
            changed.add(id(chunk))
    return changed
