# SPDX-License-Identifier: Apache-2.0
"""Draw pictures of colored shapes with a question and its answer, and make a tiny model that has learned nothing.

The model has the architecture of Qwen2.5-VL, its tokenizer knows bytes. The shapes of the validation pictures have
other places and sizes than those of the training pictures.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
SHAPES = ("circle", "square", "triangle")
QUESTION = "What is this?"
SIDE = 32  # pixels: 8 x 8 patches, 16 tokens
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def draw(rng: np.random.Generator, color: str, shape: str) -> Image.Image:
    """A shape somewhere on a noisy background."""
    noise = rng.integers(190, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    size = int(rng.integers(14, 25))
    left, top = (int(place) for place in rng.integers(1, SIDE - size, 2))
    box, pen = (left, top, left + size, top + size), ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=COLORS[color])
    elif shape == "square":
        pen.rectangle(box, fill=COLORS[color])
    else:
        pen.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], fill=COLORS[color])
    return picture


def write_pictures(folder: Path, split: str, count: int, seed: int) -> None:
    """``count`` pictures and their records."""
    rng, lines = np.random.default_rng(seed), []
    (folder / split).mkdir(parents=True)
    for number in range(count):
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        name = f"{split}/{number:04}.png"
        draw(rng, color, shape).save(folder / name)
        question = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": f"{color} {shape}"}
        lines.append(
            json.dumps({"messages": [{"role": "user", "content": question}, answer]}) + "\n"
        )
    (folder / f"{split}.jsonl").write_text("".join(lines))


def byte_tokenizer(special: tuple[str, ...], template: str) -> Any:
    """A tokenizer that knows bytes and a few ``special`` tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template
    )


def write_model(folder: Path) -> None:
    """Random weights, config, tokenizer and image processor in Hugging Face format."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    hf = byte_tokenizer(SPECIAL, TEMPLATE)
    ids = {
        f"{kind}_token_id": hf.convert_tokens_to_ids(f"<|{kind}_pad|>")
        for kind in ("image", "video")
    }
    text = {
        "vocab_size": len(hf),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [4, 4, 4],
        },
        "bos_token_id": None,
        "eos_token_id": hf.eos_token_id,
        "pad_token_id": hf.eos_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 128,
        "patch_size": 4,
        "window_size": SIDE,
        "fullatt_block_indexes": [0, 1],
    }
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    )
    model.save_pretrained(folder)
    hf.save_pretrained(folder)
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--training", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=48)
    args = parser.parse_args()
    write_pictures(args.pictures, "training", args.training, seed=1)
    write_pictures(args.pictures, "validation", args.held_out, seed=2)
    write_model(args.model)


if __name__ == "__main__":
    main()
