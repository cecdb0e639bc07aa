# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint that describe its processor: config, image processor and chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.bridge.data.media.media_rules import MediaRules, loading
from megatron.bridge.data.media.tile_processor import TileProcessor
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError

REMOTE_MODELS = ("NemotronH_Nano_VL_V2",)
"""Models whose config and image processor are remote code, which need not run."""


def read_config(path: str) -> Mapping[str, Any]:
    from transformers import AutoConfig

    with loading(path, "config.json that can be read"):
        raw = read_json_file(path, "config.json")
        return (
            raw
            if raw.get("model_type") in REMOTE_MODELS
            else AutoConfig.from_pretrained(path).to_dict()
        )


def load_image_processor(path: str, rules: MediaRules, remote: Mapping[str, Any] | None) -> Any:
    from transformers import AutoImageProcessor

    with loading(path, "image processor that can be loaded"):
        processor: Any = (
            AutoImageProcessor.from_pretrained(path)
            if remote is None
            else TileProcessor({**remote, **read_json_file(path, "preprocessor_config.json")}, path)
        )
    _limit_pixels(processor, "shortest_edge", rules.min_pixels, "min_pixels")
    _limit_pixels(processor, "longest_edge", rules.max_pixels, "max_pixels")
    return processor


def _limit_pixels(processor: Any, edge: str, value: int | None, name: str) -> None:
    """Set the minimum or maximum number of pixels of an image, which Qwen's and GLM's processors call an edge."""
    if value is None:
        return
    if not hasattr(processor, "merge_size"):
        raise UserError(
            f"dataset.{name}={value}: {type(processor).__name__} has no such limit, its images have fixed sizes: "
            "leave it unset"
        )
    from transformers.image_utils import SizeDict

    processor.size = SizeDict(**{**dict(processor.size), edge: value})
    minimum = processor.size["shortest_edge"]
    maximum = processor.size["longest_edge"]
    if minimum > maximum:
        raise UserError(
            f"dataset.{name}={value} contradicts the other limit: images would have {minimum} pixels at least and "
            f"{maximum} at most: set dataset.min_pixels and dataset.max_pixels"
        )


def chat_template(path: str) -> str | None:
    """The processor's template, which takes precedence over the tokenizer's; None if it has none."""
    text = read_text_file(path, "chat_template.jinja")
    if text is not None:
        return text
    template = read_json_file(path, "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def read_json_file(path: str, name: str) -> Mapping[str, Any]:
    text = read_text_file(path, name)
    if text is None:
        return {}
    try:
        content = strict_json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}/{name} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}/{name} is not a JSON object: download it again")
    return content


def read_text_file(path: str, name: str) -> str | None:
    """The content of a file of a checkpoint; None if there is no such file."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(file).read_text(encoding="utf-8") if file else None
