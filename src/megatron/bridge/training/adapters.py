# SPDX-License-Identifier: Apache-2.0
"""Adapters in a run: they are put on a base that is loaded first, and saved without it, but with its name."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron.bridge.checkpoint import distributed, layout, model_io, verification
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.peft.checkpoint import fingerprint, set_trained_state, trained_state
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optimizer import follow_weights
from megatron.bridge.training.state import Run
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

_BASE = "base_of_adapters"
_FILLED_FROM = "filled_from"


def adapting_hook(config: ConfigContainer) -> Callable[[list[MegatronModule]], Any] | None:
    """What loads the base weights into a new model and puts the adapters on it; None without adapters.

    It runs before precision and data parallelism wrap the model: only what is trained gets gradient buffers.
    """
    if config.peft is None:
        return None
    peft, source = config.peft, config.checkpoint.pretrained_checkpoint
    assert source is not None, "a rule refuses adapters without a base"
    if peft.seed is None:
        peft = dataclasses.replace(peft, seed=config.rng.seed)

    def adapt(chunks: list[MegatronModule]) -> None:
        load_base(chunks, Path(source))
        base = {"name": source, "fingerprint": fingerprint(chunks)}
        peft(list(chunks))
        for chunk in chunks:
            chunk.__dict__[_BASE] = base
        _tell(chunks)

    adapt.fills_every_parameter = True  # type: ignore[attr-defined]
    return adapt


def load_base(chunks: Sequence[MegatronModule], path: Path) -> None:
    """Fill a model without adapters from a Megatron checkpoint or a Hugging Face directory."""
    if on_first_rank((path / "config.json").is_file):
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        AutoBridge.from_hf_pretrained(str(path)).load_hf_weights(chunks)
    else:
        model_io.load_model(chunks, path)


def fill_before_adding(chunks: Sequence[MegatronModule], source: str) -> None:
    """Fill a new model from ``checkpoint.pretrained_checkpoint`` before it gets parameters that it has not."""
    load_base(chunks, Path(source))
    for chunk in chunks:
        chunk.__dict__[_FILLED_FROM] = source


def filled_from(run: Run) -> str | None:
    """What ``fill_before_adding`` filled the model from, if it did."""
    return model_io.unwrap(run.model[0]).__dict__.get(_FILLED_FROM)


def base_of(run: Run) -> dict[str, str] | None:
    """Name and fingerprint of the weights that the run's adapters were put on; None without adapters."""
    return model_io.unwrap(run.model[0]).__dict__.get(_BASE)


def saved_weights(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of the weights that a run saves: all, or what it trains."""
    state = model_io.model_state if run.config.peft is None else trained_state
    return state(run.model, metadata)


def set_saved_weights(run: Run, loaded: dict[str, Any]) -> None:
    """Put what ``saved_weights`` describes into the model after it was loaded."""
    put = model_io.set_model_state if run.config.peft is None else set_trained_state
    put(run.model, loaded)


def check_base(run: Run, saved: dict[str, Any], directory: Path) -> None:
    """Refuse a checkpoint of adapters for another base, or of a run of another kind.

    Raises:
        UserError: naming both bases.
    """
    theirs, ours = saved.get("base"), base_of(run)
    if theirs is None and ours is not None:
        raise UserError(
            f"checkpoint {directory} holds all weights, not adapters: set checkpoint.pretrained_checkpoint to it, "
            "and checkpoint.save to another folder"
        )
    if theirs is not None and ours is None:
        raise UserError(
            f"checkpoint {directory} holds adapters of {theirs['name']}, but peft is not set: set it as that run "
            "did, or merge them with `megatron-bridge adapter merge`"
        )
    if theirs is not None and ours is not None and theirs["fingerprint"] != ours["fingerprint"]:
        raise UserError(
            f"checkpoint {directory} holds adapters of {theirs['name']}, whose weights are not those of "
            f"checkpoint.pretrained_checkpoint={ours['name']}: set it to the base that they were trained on"
        )


def load_adapters(run: Run, path: Path) -> None:
    """Take the adapters alone from another run's checkpoint.

    Raises:
        UserError: it holds other adapters, or those of another base.
    """
    directory = on_first_rank(lambda: layout.resolve(path))
    verification.verify(directory)
    common = distributed.load_common(directory)
    check_base(run, common.get("run", {}), directory)
    state = trained_state(run.model, model_io.stored_metadata(common))
    set_trained_state(run.model, distributed.load(state, directory, known=model_io.BESIDE_WEIGHTS))
    follow_weights(run.optimizer)


def _tell(chunks: Sequence[MegatronModule]) -> None:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in parameters)
    console().print(f"training {trained:,} of the {whole:,} parameters on this rank", markup=False)
