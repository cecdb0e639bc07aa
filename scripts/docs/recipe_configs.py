# SPDX-License-Identifier: Apache-2.0
"""Write ``recipes/configs``, the models of recipes, from the published configs in tests: ``make recipe-configs``.

A text model's file has the keys that its bridge reads, as transformers spells them today, so that a recipe needs
no transformers. The file of a model with a tower has what differs from the defaults of its config class.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from scripts.docs.generated import ROOT

CONFIGS = ROOT / "src/megatron/bridge/recipes/configs"
TEXT, VISION = (ROOT / "tests/families" / name for name in ("published", "published_vision"))
IDENTITY = ("architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id")
OF_FILES = {"dtype", "transformers_version", "_name_or_path", "quantization_config"}
"""What a file says of itself; a run has its own precision."""
UNREAD = {"hidden_dropout_prob", "in_chans", "spatial_patch_size", "vision_token_id"}
"""Keys of vision-language models that transformers does not read."""
TOWERS = ("vision_config", "audio_config")
ROPE = ("rope_type", "factor", "low_freq_factor")
"""The first keys of rotary settings; the others follow in the order of the file."""
BLOCK = {"attention": ("n_heads_in_group", "no_op"), "ffn": ("ffn_mult", "no_op")}
"""The keys of each part of ``block_configs`` that say something in the published models."""


def sources() -> list[Path]:
    """The published configs."""
    return [path for folder in (TEXT, VISION) for path in sorted(folder.glob("*.json"))]


def target(source: Path) -> Path:
    """The file of the package that is made of ``source``; ``-text`` distinguishes the text model of a published one."""
    stem = source.stem.removesuffix("-text")
    has_vision_file = (VISION / f"{stem}.json").is_file()
    return CONFIGS / f"{source.stem if has_vision_file else stem}.json"


def bridge_of(source: Path) -> Any:
    """The bridge of the model whose ``config.json`` is ``source``."""
    from megatron.bridge import AutoBridge

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(source.read_bytes())
        return AutoBridge.from_hf_pretrained(folder)


def text_of(bridge: Any) -> str:
    """The file of the model that ``bridge`` converts, one key per line."""
    has_tower = any(hasattr(bridge.hf_config, key) for key in TOWERS)
    entries = _with_tower(bridge) if has_tower else _text(bridge)
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()
    )
    return f"{{\n{lines}\n}}\n"


def _text(bridge: Any) -> dict[str, Any]:
    said: dict[str, Any] = {
        **bridge.hf_config.to_dict(),
        "architectures": bridge.hf_config.architectures,
    }
    keys: list[str] = [
        field.hf for field in bridge._bridge.fields if field.hf not in (*IDENTITY, *OF_FILES)
    ]
    for block in said.get("block_configs", ()):
        block |= {part: {key: block[part][key] for key in names} for part, names in BLOCK.items()}
    if rope := said.get("rope_parameters"):
        said["rope_parameters"] = {
            key: rope[key] for key in dict.fromkeys((*ROPE, *rope)) if key in rope
        }
    return {key: said[key] for key in (*IDENTITY, *dict.fromkeys(keys)) if key in said}


def _with_tower(bridge: Any) -> dict[str, Any]:
    found: dict[str, Any] = bridge.hf_config.to_diff_dict()
    tied = bridge.to_megatron_provider(load_weights=False).share_embeddings_and_output_weights
    tower = next(key for key in TOWERS if key in found)
    parts = {key: _needed(found[key]) for key in ("text_config", tower)}
    return _needed(
        {**found, **parts, "tie_word_embeddings": tied}
    )  # transformers' default is not what files imply


def _needed(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key not in OF_FILES | UNREAD}


def main() -> None:
    """Write all files, and remove those without a source."""
    for path in CONFIGS.glob("*.json"):
        path.unlink()
    for source in sources():
        target(source).write_text(text_of(bridge_of(source)))


if __name__ == "__main__":
    main()
