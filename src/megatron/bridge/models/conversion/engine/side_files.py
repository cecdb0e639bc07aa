# SPDX-License-Identifier: Apache-2.0
"""Write the files of an exported model other than weights: config, tokenizer, model card, and the source's files."""

import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from megatron.bridge.checkpoint import model_io, paths
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.lazy_planner import LazySavePlanner
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.engine import stored_provider
from megatron.bridge.models.conversion.engine.quantize import AsSource, Quantizer, ToFormat
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, as_dict
from megatron.bridge.models.hf_pretrained import (
    PreTrainedCausalLM,
    model_card,
    model_folder,
    quantization_configs,
)
from megatron.bridge.models.hf_pretrained.model_card import History
from megatron.bridge.models.hf_pretrained.quantization_configs import without_quantization
from megatron.bridge.models.hf_pretrained.safetensors_files import dtype_name
from megatron.bridge.utils import distributed, storage
from megatron.bridge.utils.config.serialize import to_plain

# keys of older configs that newer keys replace
_REPLACED = {
    "rope_parameters": (
        "rope_scaling",
        "rope_theta",
        "rope_local_base_freq",
        "partial_rotary_factor",
    ),
    "layer_types": ("sliding_window_pattern",),
    "dtype": ("torch_dtype",),
}
_LARGEST_WITH_A_TOKENIZER = 64 << 20
_OF_RUN = ("report.md", "loss.png")
# dataset settings of a run, and older names in these files -> image sizes
_IMAGE_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# files of a tokenizer or processor that may hold a chat template in addition to or instead of ``chat_template.jinja``
_WITH_TEMPLATES = ("tokenizer_config.json", "processor_config.json", "chat_template.json")
OF_MODEL = ("config.json", "generation_config.json")  # small files that describe the weights
_NAMED_TEMPLATES = "additional_chat_templates"
_VIDEO_LIMITS = ("fps", "max_frames")


def write(
    bridge: MegatronModelBridge,
    provider: Any,
    source: Any,
    directory: Path,
    title: str,
    history: History,
    dtype: torch.dtype | None = None,
    quantizer: Quantizer | None = None,
) -> None:
    """Write all files except weights.

    Args:
        bridge: the architecture's bridge.
        provider: the declared provider of the model.
        source: the Hugging Face model that the export imitates, or its config.
        directory: where to write.
        title: name of the model for its card.
        history: facts for the card.
        dtype: dtype of the written weights; None means the source's.
        quantizer: what has quantized weights; None if all are in full.
    """
    for file in history.run_files:
        shutil.copyfile(file, directory / file.name)
    stored = {} if dtype is None else {"dtype": dtype_name(dtype)}
    if not isinstance(source, PreTrainedCausalLM):
        plain = {**without_quantization(as_dict(source)), **stored}
        if bridge.changed_config(provider, plain):
            plain = bridge.config_of(provider, plain)
        if isinstance(quantizer, ToFormat):
            plain[quantization_configs.KEY] = quantizer.config
        cast(Any, type(source)).from_dict(plain).save_pretrained(directory)
        (directory / model_card.NAME).write_text(model_card.compose(title, None, None, history))
        return
    for name in source.side_files():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.directory / name, directory / name)
    _write_media_limits(directory, history.image_limits)
    if history.chat_template is not None:
        write_chat_template(directory, history.chat_template)
    if isinstance(quantizer, AsSource):
        for path in source.quantization_files():
            shutil.copyfile(path, directory / path.name)
    _write_config(bridge, provider, source, directory, stored, quantizer)
    _write_card(source, directory / model_card.NAME, title, history)


def _write_media_limits(directory: Path, limits: Mapping[str, float]) -> None:
    """Write a run's limits of images and videos for the processor."""
    if any(name in limits for name in _IMAGE_LIMITS):
        _write_limits(directory, limits)
    frames = {name: limits[name] for name in _VIDEO_LIMITS if name in limits}
    if frames:
        _write_frames(directory, frames)


def _write_config(
    bridge: MegatronModelBridge,
    provider: Any,
    source: PreTrainedCausalLM,
    directory: Path,
    stored: dict[str, Any],
    quantizer: Quantizer | None,
) -> None:
    """Write the source's config, updated with the values that the model changed."""
    changed = bridge.changed_config(provider, as_dict(source.config))
    changed.pop(
        "dtype", None
    )  # the files keep the source's dtypes unless the caller asks for another
    changed |= stored
    if "architectures" in changed and provider.head == "sequence_classification":
        changed |= _padding_token(directory, source.raw_config)
    config = {**source.raw_config, **changed}
    if not isinstance(quantizer, AsSource):
        config = without_quantization(config)
    if isinstance(quantizer, ToFormat):
        config[quantization_configs.KEY] = quantizer.config
    for name in changed:
        for old in _REPLACED.get(name, ()):
            config.pop(old, None)
    if config != source.raw_config:
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _padding_token(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's padding token for a config without one; a new classifier needs it to score a batch."""
    settings = _json_file(directory / "tokenizer_config.json")
    token = settings.get("pad_token")
    if config.get("pad_token_id") is not None or token is None:
        return {}
    name: str = cast(Any, token)["content"] if isinstance(token, dict) else token
    tokenizer = _json_file(directory / "tokenizer.json")
    vocabulary: Any = tokenizer.get("model", {}).get("vocab", {})
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids |= cast("dict[str, int]", vocabulary)
    ids |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}
    for token_id, added in settings.get("added_tokens_decoder", {}).items():
        ids[added["content"]] = int(token_id)
    return {"pad_token_id": ids[name]} if name in ids else {}


def _json_file(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write_limits(directory: Path, limits: Mapping[str, float]) -> None:
    """Write the run's image sizes for the image processor; older keys are removed, because they could contradict."""
    from transformers import AutoImageProcessor

    size = cast(Any, AutoImageProcessor).from_pretrained(directory).size
    edges: dict[str, float] = {
        edge: limits.get(name, size[edge]) for name, edge in _IMAGE_LIMITS.items()
    }
    for path in (directory / name for name in _PROCESSORS if (directory / name).is_file()):
        processor: dict[str, Any] = json.loads(path.read_text())
        values = processor.get("image_processor", processor)
        values["size"] = edges
        for name in _IMAGE_LIMITS:
            values.pop(name, None)
        path.write_text(json.dumps(processor, indent=2) + "\n")


def _write_frames(directory: Path, limits: Mapping[str, float]) -> None:
    """Write the run's number of video frames to the file that transformers' video processor reads."""
    values: dict[str, Any] = {"do_sample_frames": True, **limits}
    if (
        json.loads((directory / "config.json").read_text()).get("model_type") == "smolvlm"
    ):  # the limit's name there
        values |= {"num_frames": values.pop("max_frames")} if "max_frames" in values else {}
    elif "fps" in values:
        values["num_frames"] = None  # the processor would sample this number from any video
    combined = directory / "processor_config.json"
    processor: dict[str, Any] = json.loads(combined.read_text()) if combined.is_file() else {}
    if "video_processor" in processor:
        processor["video_processor"] |= values
        combined.write_text(json.dumps(processor, indent=2) + "\n")
        return
    video_file = directory / "video_preprocessor_config.json"
    path = video_file if video_file.is_file() else directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2) + "\n")


def write_chat_template(directory: Path, template: str) -> None:
    """Make ``template`` the only chat template of the tokenizer and of the processor in ``directory``.

    Readers differ in the file that they prefer, so every file that holds a template gets this one. Named templates,
    such as one for tools, were not trained and are removed.
    """
    (directory / paths.CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    shutil.rmtree(directory / _NAMED_TEMPLATES, ignore_errors=True)
    for path in (directory / name for name in _WITH_TEMPLATES if (directory / name).is_file()):
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "chat_template" in values:
            values["chat_template"] = template
            path.write_text(
                json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )


def _write_card(source: PreTrainedCausalLM, path: Path, title: str, history: History) -> None:
    source_card = path.read_text(errors="surrogateescape") if path.is_file() else None
    card = model_card.compose(
        title, model_card.public_name(source.model_name_or_path), source_card, history
    )
    if card != source_card:
        path.write_text(card, errors="surrogateescape")


def history_of(model: nn.Module | Sequence[nn.Module], merge: bool) -> History:
    """Return the history of a model in memory: the adapters that will be merged."""
    method = next(
        (
            chunk_peft
            for chunk in model_io.as_chunks(model)
            if (chunk_peft := chunk_info(chunk).peft) is not None
        ),
        None,
    )
    if method is None or not merge:
        return History()
    rank = getattr(method, "dim", None)
    return History(adapters=type(method).__name__ + (f" of rank {rank}" if rank else ""))


def history_of_checkpoint(path: str | Path, adapters: str = "") -> History:
    """Return the history of a checkpoint from the folder of its run: steps, initial weights, losses."""
    directory = paths.resolve(path)
    steps = paths.iteration_of(directory) or 0
    described = model_io.has_run_config(directory)
    run = model_io.read_run_config(directory) if described else {}
    begun, data = (cast(dict[str, Any], run.get(name) or {}) for name in ("checkpoint", "dataset"))
    from_scratch = described and bool(steps)
    from_scratch &= not any(begun.get(key) for key in ("pretrained_checkpoint", "load"))
    losses = model_card.last_losses(directory.parent, steps) if steps else {}
    candidates = (directory / paths.RUN_CONFIG, *(directory.parent / name for name in _OF_RUN))
    run_files = tuple(file for file in candidates if steps and file.is_file())
    limits = {name: data[name] for name in (*_IMAGE_LIMITS, *_VIDEO_LIMITS) if data.get(name)}
    return History(
        steps,
        from_scratch,
        adapters,
        losses=losses,
        run_files=run_files,
        image_limits=limits,
        chat_template=model_io.trained_template(directory),
    )


def tokenizer_files(source: PreTrainedCausalLM) -> list[Path]:
    """Return the source's small files next to its weights, which include the tokenizer's files."""
    files = (source.directory / name for name in source.side_files() if len(name.parts) == 1)
    return [
        path
        for path in files
        if path.name != model_card.NAME and path.stat().st_size <= _LARGEST_WITH_A_TOKENIZER
    ]


def save_megatron(
    model: Any, path: str | Path, source: Any, planner: LazySavePlanner | None = None
) -> Path:
    """Save the chunks of a model as a Megatron checkpoint, with the tokenizer of ``source`` if it has one."""
    files = None
    described = {"model": to_plain(stored_provider.provider_of(model))}
    if isinstance(source, PreTrainedCausalLM):
        files = tokenizer_files(source)
        described[model_io.HF_MODEL_ID] = str(source.model_name_or_path)
    return model_io.save_model(
        model_io.as_chunks(model), path, described, tokenizer_files=files, planner=planner
    )


@contextmanager
def published(path: Path, overwrite: bool = True) -> Generator[Path]:
    """Yield a staging directory on all ranks; its files are published into ``path``, or deleted on an error."""
    path = storage.local(path)
    staging = on_first_rank(lambda: model_folder.create_staging(path, overwrite))
    try:
        yield staging
        on_first_rank(lambda: model_folder.publish(staging, path))
    except BaseException:
        # no collectives here: this rank may be the only one that failed
        if distributed.rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def precision_note(source: Any, quantizer: Quantizer | None) -> str:
    """Return a note for an exported model that is quantized, or whose source is; all ranks must call this."""
    if quantizer is not None:
        return quantizer.summary()
    if not isinstance(source, PreTrainedCausalLM):
        return ""
    quantization = source.quantization
    if quantization is None:
        return ""
    return f" (unquantized, although its source is stored in {quantization['quant_method']})"
