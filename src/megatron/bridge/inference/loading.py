# SPDX-License-Identifier: Apache-2.0
"""Load a model for decoding from a Hugging Face model, a Megatron checkpoint, or an adapter and its base model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.bridge.backends.low_bit import rounded_layers
from megatron.bridge.checkpoint import model_io, paths
from megatron.bridge.data.media.media_rules import MediaRules, has_processor
from megatron.bridge.data.tokenizer import load_hf_tokenizer
from megatron.bridge.inference.adapter_bank import AdapterNames, add_adapters
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.engine import stored_provider
from megatron.bridge.models.conversion.pretrained import tokenizer_of
from megatron.bridge.models.features.multi_token_prediction import drop_mtp_layers
from megatron.bridge.models.gpt_provider import pad_query_groups
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.peft import hf_adapter, low_bit_base
from megatron.bridge.peft.checkpoint import load_adapters, saved_base
from megatron.bridge.utils import console, storage
from megatron.bridge.utils.errors import UserError


class HeadError(UserError):
    """A model has a head instead of an output layer, so it generates no tokens."""


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with its tokenizer and limits."""

    chunks: list[Any]  # of this rank
    hf: Any  # transformers tokenizer; None if the model has no tokenizer files
    folder: Path | None  # folder of the tokenizer and ``generation_config.json``
    vocabulary: int  # size of the vocabulary without padding
    max_context: int  # maximum number of tokens of a text
    bridge: AutoBridge | None = None  # bridge of the architecture; None for a Megatron checkpoint
    adapters: AdapterNames | None = None  # adapters that requests choose by name
    media: MediaRules | None = (
        None  # how images are processed; None for a model without a vision tower
    )
    template: str | None = None
    """Chat template that the model was trained with, if it is not the tokenizer's."""


def load(
    path: str | Path,
    sizes: Mapping[str, Any],
    dtype: str | None = None,
    adapter: str | Path | None = None,
    adapters: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    media_root: str | None = None,
    with_head: bool = False,
    head: str | None = None,
    with_mtp: bool = False,
) -> LoadedModel:
    """Load a model with the parallel sizes of the running processes.

    Args:
        path: directory or hub id of a Hugging Face model, or a Megatron checkpoint. For a checkpoint of adapters, this
            also loads the base model.
        sizes: parallel sizes by the names of the provider's fields.
        dtype: dtype of weights and caches; None uses the dtype of the checkpoint.
        adapter: run with adapters, one of its checkpoints, or a directory in ``peft`` format. ``none`` leaves out an
            adapter that is in the folder of the model.
        adapters: several adapters by name, for requests to choose from.
        tokenizer: directory or hub id of another tokenizer.
        media_root: folder that must contain the images; None allows any path.
        with_head: the model may have a head instead of an output layer.
        head: the head to give to a model that has an output layer.
        with_mtp: keep the layers of multi-token prediction.

    Raises:
        HeadError: the model has a head, and ``with_head`` is false.
        UserError: there is no such model, or the options contradict each other.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    leaves_out_adapter = hub.leaves_out_adapter(path, adapter)
    path, adapter, run = _on_base(path, None if adapter == "none" else adapter)
    if adapter is not None and adapter == run:
        leaves_out_adapter = True  # the run has a fingerprint of its base's weights
    if adapter is not None and adapters:
        raise UserError(
            f"--adapter {adapter} applies to all requests: remove it, or remove --adapters"
        )
    for folder in (adapter, *(adapters or {}).values()):
        if folder is not None and not hub.is_peft_adapter(folder):
            paths.resolve(folder)
    source = _Source.of(path, sizes, trust_remote_code, leaves_out_adapter)
    provider = source.provider
    bridge = source.bridge
    _set_head(path, provider, head, with_head)
    used = tokenizer or (tokenizer_of(path) if bridge is None else None)
    hf = _load_tokenizer(source.folder, used, trust_remote_code)
    _note_larger_tokenizer(hf, provider, used or source.folder)
    _prepare_provider(provider, sizes)
    if provider.mtp_num_layers and not with_mtp:
        drop_mtp_layers(provider)
    precision = {} if dtype is None else {"fp16": dtype == "float16", "bf16": dtype == "bfloat16"}
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False, pre_wrap_hook=source.hook, **precision
    )
    _fix_rounded_weights(chunks, provider)
    if adapter is not None:
        attach_adapter(bridge, chunks, Path(adapter))
    names = (
        add_adapters(chunks, adapters, partial(attach_adapter, bridge, chunks))
        if adapters
        else None
    )
    for chunk in chunks:
        chunk.eval()
    media = None
    if getattr(provider, "vision", None) is not None:
        media = _media_rules(run, (tokenizer, source.folder, used), media_root or "/")
    return LoadedModel(
        chunks,
        hf,
        source.folder,
        provider.vocab_size,
        _longest_context(provider),
        bridge,
        names,
        media,
        template=_trained_template(path, adapter),
    )


def _set_head(path: str | Path, provider: Any, head: str | None, allowed: bool) -> None:
    if head is not None:
        provider.head = head
    if getattr(provider, "head", None) is not None and not allowed:
        raise HeadError(
            f"{path} has head={provider.head} and does not generate tokens: `megatron-bridge serve` and "
            "megatron.bridge.inference.pooling.PooledModel return its scores and embeddings"
        )


def _fix_rounded_weights(chunks: Sequence[Any], provider: Any) -> None:
    """Give a model of quantization-aware training the weights that it was trained with."""
    if getattr(provider, "qat", None) is None:
        return
    for chunk in chunks:
        rounded_layers.fix_rounded_weights(chunk)
    console.print_rank_0(
        f"note: weights are rounded to {provider.qat}, as in training; inputs of products are not"
    )


def _note_larger_tokenizer(hf: Any, provider: Any, folder: Any) -> None:
    """Note that the tokenizer has tokens without an embedding, which the engine refuses in prompts."""
    if hf is None or provider.vocab_size is None or len(hf) <= provider.vocab_size:
        return
    console.print_rank_0(
        f"note: the tokenizer {folder} has {len(hf)} tokens and the model {provider.vocab_size} embeddings, so prompts "
        "with the others are refused: use the model's own tokenizer"
    )


@dataclass(frozen=True)
class _Source:
    """A model on disk before it is built."""

    bridge: AutoBridge | None
    provider: Any
    folder: Path | None
    hook: Any  # loads the weights of a Megatron checkpoint; a bridge loads its own weights

    @classmethod
    def of(
        cls,
        path: str | Path,
        sizes: Mapping[str, Any],
        trust_remote_code: bool,
        leaves_out_adapter: bool,
    ) -> "_Source":
        if hub.is_megatron(path):
            provider = stored_provider.read_for_layout(path, sizes)
            return cls(
                None, provider, model_io.tokenizer_dir(path), stored_provider.load_hook(path)
            )
        bridge = AutoBridge.from_hf_pretrained(
            path,
            trust_remote_code=trust_remote_code,
            adapter="none" if leaves_out_adapter else None,
        )
        return cls(bridge, bridge.to_megatron_provider(), bridge.hf_pretrained.directory, None)


def _on_base(
    path: str | Path, adapter: str | Path | None
) -> tuple[str | Path, str | Path | None, str | Path | None]:
    """Return the paths of model, adapter and run for a path that may be a checkpoint of adapters."""
    if not hub.is_megatron(path):
        return path, adapter, None
    _, base = saved_base(path)
    if base is None:
        return path, adapter, path
    if adapter is not None:
        raise UserError(
            f"{path} holds adapters itself: remove --adapter {adapter}, or give their base model"
        )
    return base["name"], path, path


def _media_rules(
    run: str | Path | None, tokenizer_folders: Sequence[str | Path | None], root: str
) -> MediaRules | None:
    """Return the image processor next to a tokenizer, or else the run's, with the image limits of the run."""
    data: dict[str, Any] = {}
    if run is not None and model_io.has_run_config(paths.resolve(run)):
        data = model_io.read_run_config(run).get("dataset") or {}
    given, *further_folders = tokenizer_folders
    candidates = (
        str(candidate)
        for candidate in (given, data.get("hf_processor_path"), *further_folders)
        if candidate is not None
    )
    path = next(filter(has_processor, candidates), None)
    limits: dict[str, Any] = {
        name: data.get(name) for name in ("min_pixels", "max_pixels", "fps", "max_frames")
    }
    return None if path is None else MediaRules(path, root, **limits)


def _trained_template(path: str | Path, adapter: str | Path | None) -> str | None:
    """Return the chat template that the adapter was trained with, or else the model."""
    template = None if adapter is None else model_io.trained_template(adapter)
    if template is None and hub.is_megatron(path):
        template = model_io.trained_template(path)
    return template


def _prepare_provider(provider: Any, sizes: Mapping[str, Any]) -> None:
    """Set the layout, and turn off training-only settings."""
    for name, value in sizes.items():
        setattr(provider, name, value)
    provider.backend = "torch"
    provider.sequence_parallel = False
    pad_query_groups(provider)


def _longest_context(provider: Any) -> int:
    """Return the maximum number of tokens of a text."""
    limit = provider.max_position_embeddings or provider.seq_length
    if provider.position_embedding_type == "learned_absolute":
        return min(limit, provider.seq_length)
    return int(limit)


def _load_tokenizer(folder: Path | None, given: str | None, trust_remote_code: bool) -> Any:
    if given is not None:
        return load_hf_tokenizer(given, trust_remote_code)
    if folder is None or not hub.has_tokenizer(folder):
        return None
    return load_hf_tokenizer(str(folder), trust_remote_code)


def attach_adapter(
    bridge: AutoBridge | None,
    chunks: list[Any],
    path: Path,
    check_method: Callable[[Any], None] | None = None,
) -> None:
    """Attach the adapter at a path to this rank's chunks, and load its weights.

    Args:
        bridge: Bridge of the base model; None for a Megatron checkpoint.
        chunks: This rank's chunks.
        path: Directory in ``peft`` format, run with adapters, or one of its checkpoints.
        check_method: May refuse the method of the adapter before the model changes.
    """
    path = storage.local(path)
    if not hub.is_peft_adapter(path):
        load_adapters(chunks, path, check_method=check_method, bridge=bridge)
        low_bit_base.restore(chunks)
        return
    if bridge is None:
        raise UserError(
            f"the adapter {path} is in the format of peft, which needs a Hugging Face base model"
        )
    method = hf_adapter.peft_for(bridge, path)
    if check_method is not None:
        check_method(method)
    method(chunks, training=False)
    bridge.load_hf_adapter(chunks, path)
