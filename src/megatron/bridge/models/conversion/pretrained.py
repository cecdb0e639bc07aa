# SPDX-License-Identifier: Apache-2.0
"""Access models in either format: a Hugging Face model or a Megatron checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatron.bridge.checkpoint import model_io, paths
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion import describe
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.engine import stored_provider
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM, hub
from megatron.bridge.models.hf_pretrained.hub import is_hf_model
from megatron.bridge.utils import storage
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import url_of


def is_megatron_checkpoint(name: str | Path) -> bool:
    """Return whether ``name`` is a directory in Megatron's format; other names belong to Hugging Face models."""
    return not is_hf_model(name) and (
        url_of(storage.local(name)) is not None or Path(name).is_dir()
    )


def local_weights(name: str | Path) -> Path:
    """Return the local directory of weights: ``name`` itself in either format, or the download of a hub id."""
    if hub.is_hub_id(name):
        return hub.resolve(name, weights=True)
    return storage.local(name).expanduser() if is_hf_model(name) else paths.resolve(name)


def tokenizer_of(name: str | Path) -> str | None:
    """Return directory or hub id of the tokenizer with the weights ``name``, or of the run that wrote them, if any.

    ``name`` may also be a folder with a tokenizer alone, as transformers' ``save_pretrained`` writes it.
    """
    if Path(name).is_dir() and hub.has_tokenizer(Path(name)):
        return str(name)
    if is_megatron_checkpoint(name):
        saved_tokenizer = model_io.tokenizer_dir(name)
        # a model without a tokenizer leaves its other files there
        if saved_tokenizer is not None and hub.has_tokenizer(saved_tokenizer):
            return str(saved_tokenizer)
        if not (paths.resolve(name) / paths.RUN_CONFIG).is_file():
            return None
        tokenizer: dict[str, str | None] = model_io.read_run_config(name).get("tokenizer") or {}
        of_run = tokenizer.get("tokenizer_model")
        return None if of_run is None else tokenizer_of(of_run)
    folder = hub.on_this_machine(name)
    return str(name) if folder is not None and hub.has_tokenizer(folder) else None


def load_weights(chunks: Sequence[nn.Module], path: Path, ignore_adapter: bool = False) -> None:
    """Load this rank's chunks from a local directory in either format; all ranks call this.

    The caller must verify a Megatron checkpoint.

    Args:
        chunks: this rank's chunks.
        path: local directory of the weights.
        ignore_adapter: leave out an adapter that is next to Hugging Face weights, instead of refusing them.
    """
    if on_first_rank(lambda: is_hf_model(path)):
        adapter = "none" if ignore_adapter else None
        AutoBridge.from_hf_pretrained(path, adapter=adapter).load_hf_weights(chunks)
    else:
        model_io.load_model(chunks, path, verify=False)


def check_export(chunks: Sequence[nn.Module], weights: str | Path | None = None) -> None:
    """Refuse a model that ``megatron-bridge export`` could not write; all ranks call this.

    Args:
        chunks: this rank's chunks, with values or on the meta device.
        weights: the weights that the model starts from, in either format; an export imitates those of Hugging Face.
    """
    bridge = _declared_bridge(chunks, weights)
    if bridge is not None:
        bridge.check_export(chunks)
    elif not describe.architectures_of(stored_provider.provider_of(chunks)):
        raise UserError("no Hugging Face architecture computes what this model does")


def export_bridge(chunks: Sequence[nn.Module], weights: str | Path | None = None) -> AutoBridge:
    """Return a bridge that exports a model in training.

    Args:
        chunks: this rank's chunks.
        weights: the weights that the model starts from, in either format; an export imitates those of Hugging Face.

    Raises:
        UserError: the model was not built from a Hugging Face config.
    """
    bridge = _declared_bridge(chunks, weights)
    if bridge is None:
        raise UserError(
            "the model was not built from a Hugging Face config, so its weights cannot be written for other engines: "
            "start from a Hugging Face model"
        )
    return bridge


def _declared_bridge(chunks: Sequence[nn.Module], weights: str | Path | None) -> AutoBridge | None:
    """The bridge of the model that ``chunks`` were built from; None without a Hugging Face config."""
    source: Any = stored_provider.provider_of(chunks).hf_config
    folder = None if weights is None else hub.on_this_machine(weights)
    if folder is not None and is_hf_model(folder):
        source = PreTrainedCausalLM(folder)
    return None if source is None else AutoBridge(source)


def declared_provider(folder: Path) -> Any:
    """Return the provider of the model in ``folder``, in either format, without its weights."""
    if is_megatron_checkpoint(folder):
        return stored_provider.read(folder)
    return AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)


def provider_of(name: str, trust_remote_code: bool = False) -> Any:
    """Return the provider of ``name``, a directory in either format or a hub id; it also loads the weights."""
    if not is_megatron_checkpoint(name):
        return AutoBridge.from_hf_pretrained(
            name, trust_remote_code=trust_remote_code
        ).to_megatron_provider()
    provider = stored_provider.read(name)
    provider.register_pre_wrap_hook(stored_provider.load_hook(name))
    return provider
