# SPDX-License-Identifier: Apache-2.0
"""Adapters in a run: added to a base model that is loaded first, and saved without it but with its name."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.checkpoint import loading, model_io, paths
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion import pretrained
from megatron.bridge.models.model_provider import PreWrapHook
from megatron.bridge.peft import low_bit_base
from megatron.bridge.peft.checkpoint import fingerprint, set_trained_state, trained_state
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optim.optimizer_state import reload_main_weights
from megatron.bridge.training.state import Run
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError


def adapting_hook(config: ConfigContainer, training: bool = True) -> PreWrapHook | None:
    """A hook that loads the base weights into a new model and adds the adapters; None without adapters.

    It runs before the model is wrapped for precision and data parallelism: only trained parameters get gradient
    buffers. Without ``training``, adapters are frozen, too.
    """
    if config.peft is None:
        return None
    peft = config.peft
    source = config.checkpoint.pretrained_checkpoint
    assert source is not None, "a rule refuses adapters without a base"
    if peft.seed is None:
        peft = dataclasses.replace(peft, seed=config.rng.seed)

    def adapt(chunks: list[MegatronModule]) -> None:
        directory = pretrained.local_weights(source)
        peft.lower_base(chunks, is_loaded=False)
        pretrained.load_weights(chunks, directory, config.checkpoint.ignore_adapter)
        base = {"name": source, "fingerprint": fingerprint(chunks)}
        peft(list(chunks), training)
        for note in (*peft.notes(), *low_bit_base.notes(chunks)):
            print_rank_0(f"note: {note}")
        for chunk in chunks:
            chunk_info(chunk).base = base
        _print_trained_count(chunks)

    return PreWrapHook(adapt, fills_every_parameter=True)


def fill_before_adding(chunks: Sequence[MegatronModule], source: str, ignore_adapter: bool) -> None:
    """Load a new model from ``checkpoint.pretrained_checkpoint`` before parameters are added to it."""
    pretrained.load_weights(chunks, pretrained.local_weights(source), ignore_adapter)
    for chunk in chunks:
        chunk_info(chunk).filled_from = source


def saved_weights(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    """The sharded state dict of the weights that a run saves: all, or with PEFT the trained ones."""
    state = model_io.model_state if run.config.peft is None else trained_state
    return state(run.model, metadata)


def set_saved_weights(run: Run, loaded: dict[str, Any]) -> None:
    """Set the weights of the model from the loaded state dict of ``saved_weights``."""
    put = model_io.set_model_state if run.config.peft is None else set_trained_state
    put(run.model, loaded)


def check_base(run: Run, saved: dict[str, Any], directory: Path) -> None:
    """Refuse adapters of another base model, and adapters in a run without PEFT or vice versa."""
    saved_base = saved.get("base")
    run_base = chunk_info(run.model[0]).base
    if saved_base is None and run_base is not None:
        raise UserError(
            f"checkpoint {directory} holds all weights, not adapters: set checkpoint.pretrained_checkpoint to it, "
            "and checkpoint.save to another folder"
        )
    if saved_base is not None and run_base is None:
        raise UserError(
            f"checkpoint {directory} holds adapters of {saved_base['name']}, but peft is not set: set it as in that "
            "run, or merge the adapters with `megatron-bridge adapter merge`"
        )
    if (
        saved_base is not None
        and run_base is not None
        and saved_base["fingerprint"] != run_base["fingerprint"]
    ):
        raise UserError(
            f"checkpoint {directory} holds adapters of {saved_base['name']}, whose weights differ from those of "
            f"checkpoint.pretrained_checkpoint={run_base['name']}: set it to the base model of the adapters"
        )


def load_adapters(run: Run, path: Path) -> None:
    """Load only the adapters from the checkpoint of another run, which is verified already."""
    directory = on_first_rank(lambda: paths.resolve(path))
    common = loading.load_common(directory)
    check_base(run, common.get("run", {}), directory)
    state = trained_state(run.model, model_io.stored_metadata(common))
    set_trained_state(run.model, loading.load(state, directory, known=model_io.BESIDE_WEIGHTS))
    reload_main_weights(run.optimizer)


def _print_trained_count(chunks: Sequence[MegatronModule]) -> None:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    print_rank_0(f"training {trained:,} of the {total:,} parameters on this rank")
