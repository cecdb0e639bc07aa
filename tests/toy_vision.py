# SPDX-License-Identifier: Apache-2.0
"""Tiny vision-language models with all their files: config, weights, tokenizer, image processor, template."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.families.own_models import model_class
from tests.families.vision.rows import ROWS

SPECIAL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    ),
    *(
        "<|video_pad|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<start_of_image>",
        "<end_of_image>",
    ),
    *(
        "<image_soft_token>",
        "[IMG]",
        "[IMG_BREAK]",
        "[IMG_END]",
        "<image>",
        "<video>",
        "<img>",
        "</img>",
    ),
    *(
        "<IMG_CONTEXT>",
        "<fake_token_around_image>",
        "<global-img>",
        "<|video|>",
        "<|begin_of_video|>",
    ),
    *("<|end_of_video|>", "<end_of_utterance>", "<bos>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
VOCABULARY = 320

TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}MARK{% elif part['type'] == 'video' %}FILM\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}\
{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LISTS = """{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if part['type'] == 'image' %}MARK{% elif part['type'] == 'video' %}FILM\
{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Toy:
    """How a family processes images.

    Attributes:
        row: the row of ``tests.families.vision`` with the model.
        image: what the model calls an image token.
        mark: what the template writes for an image.
        images: class of the image processor, and its arguments.
        processor: class of the composite processor, and its arguments.
        videos: class of the video processor; none if empty.
        audio: class of the feature extractor; none if empty.
        film: what the template writes for a video.
        named: special tokens that the tokenizer has under a name.
        text: keys of the text model that differ from those of the row.
        video_options: arguments of the video processor.
    """

    row: str
    image: str
    mark: str
    images: tuple[str, dict[str, Any]]
    processor: tuple[str, dict[str, Any]]
    videos: str = ""
    named: dict[str, str] = field(default_factory=dict)
    template: str = TEMPLATE
    audio: str = ""
    film: str = "<video>"
    text: dict[str, Any] = field(default_factory=dict)
    video_options: dict[str, Any] = field(default_factory=dict)


def _qwen(row: str, processor: str) -> Toy:
    size = {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 12}
    images = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    videos = "Qwen3VLVideoProcessor" if row.startswith("qwen3") else "Qwen2VLVideoProcessor"
    film = mark.replace("image", "video")
    return Toy(
        row,
        "<|image_pad|>",
        mark,
        ("Qwen2VLImageProcessor", images),
        (processor, {}),
        videos,
        film=film,
    )


def _glm(row: str) -> Toy:
    size = {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 8 * 8 * 12}
    images = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    mark = "<|begin_of_image|><|image|><|end_of_image|>"
    film = mark.replace("image", "video")
    kind = "Glm46V" if row == "glm46v" else "Glm4v"
    processors = (
        (f"{kind}ImageProcessor", images),
        (f"{kind}Processor", {}),
        f"{kind}VideoProcessor",
    )
    return Toy(row, "<|image|>", mark, *processors, film=film)


def _gemma4(row: str) -> Toy:
    kind = "Gemma4Unified" if "unified" in row else "Gemma4"
    merged = ROWS[row].config["vision_config"]["pooling_kernel_size"]
    images = {"patch_size": 4, "pooling_kernel_size": merged, "max_soft_tokens": 70}
    per_layer = "vocab_size_per_layer_input"
    has_per_layer = per_layer in ROWS[row].config["text_config"]
    return Toy(
        *(row, "<|image|>", "<|image|>"),
        (f"{kind}ImageProcessor", images),
        (f"{kind}Processor", {}),
        f"{kind}VideoProcessor",
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<|image|>",
            "boa_token": "<img>",
            "eoa_token": "</img>",
            "audio_token": "[IMG]",
        },
        audio=f"{kind}AudioFeatureExtractor",
        film="<|video|>",
        video_options={**images, "num_frames": 4},
        # a window that is longer than an image
        text={"sliding_window": 80, **({per_layer: VOCABULARY} if has_per_layer else {})},
    )


def _pixtral(row: str) -> Toy:
    return Toy(
        *(row, "[IMG]", "[IMG]"),
        ("PixtralImageProcessor", {"size": {"longest_edge": 32}, "patch_size": _square(4)}),
        ("PixtralProcessor", {"patch_size": 4, "spatial_merge_size": 2}),
    )


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_TILES = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]], "crop_size": _square(8)}
_IDEFICS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_INTERN = {"size": _square(16), "max_patches": 4, "min_patches": 1, "crop_to_patches": True}

TOYS: dict[str, Toy] = {
    toy.row: toy
    for toy in (
        _qwen("qwen2_vl", "Qwen2VLProcessor"),
        _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
        _qwen("qwen3_vl", "Qwen3VLProcessor"),
        _qwen("qwen3_vl_moe", "Qwen3VLProcessor"),
        _qwen("qwen3_5_vl", "Qwen3VLProcessor"),
        _qwen("qwen3_5_moe_vl", "Qwen3VLProcessor"),
        _glm("glm4v"),
        _glm("glm4v_moe"),
        _glm("glm46v"),
        Toy(
            *("gemma3_vl", "<image_soft_token>", "<start_of_image>"),
            ("Gemma3ImageProcessor", {"size": _square(16)}),
            ("Gemma3Processor", {"image_seq_length": 4}),
            named={
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
        ),
        *map(_gemma4, ("gemma4_vl", "gemma4_vl_small", "gemma4_unified")),
        Toy(
            *("paligemma", "<image>", "<image>"),
            ("SiglipImageProcessor", {"size": _square(16), "image_seq_length": 16}),
            ("PaliGemmaProcessor", {}),
            template="",
        ),
        Toy(
            *("nemotron_h_omni", "<image>", "<image>"),
            (
                "NemotronH_Omni_Reasoning_V3ImageProcessor",
                {"patch_size": 4, "min_num_patches": 8, "max_num_patches": 40},
            ),
            ("NemotronH_Omni_Reasoning_V3Processor", {}),
            "NemotronH_Omni_Reasoning_V3VideoProcessor",
            audio="ParakeetFeatureExtractor",
        ),
        *(_pixtral(row) for row in ("mistral3", "ministral3_vl")),
        Toy(
            *("llava", "<image>", "<image>"),
            ("CLIPImageProcessor", {"size": {"shortest_edge": 16}, "crop_size": _square(16)}),
            (
                "LlavaProcessor",
                {
                    "patch_size": 4,
                    "vision_feature_select_strategy": "default",
                    "num_additional_image_tokens": 1,
                },
            ),
            template=LISTS,
        ),
        Toy(
            *("llava_next", "<image>", "<image>"),
            ("LlavaNextImageProcessor", {"size": {"shortest_edge": 8}, **_TILES}),
            (
                "LlavaNextProcessor",
                {
                    "patch_size": 4,
                    "vision_feature_select_strategy": "default",
                    "num_additional_image_tokens": 1,
                },
            ),
        ),
        Toy(
            *("llava_onevision", "<image>", "<image>"),
            (
                "LlavaOnevisionImageProcessor",
                {"size": _square(8), "image_grid_pinpoints": _TILES["image_grid_pinpoints"]},
            ),
            (
                "LlavaOnevisionProcessor",
                {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
            ),
            "LlavaOnevisionVideoProcessor",
        ),
        Toy(
            *("internvl", "<IMG_CONTEXT>", "<IMG_CONTEXT>\n"),
            ("GotOcr2ImageProcessor", _INTERN),
            ("InternVLProcessor", {"image_seq_length": 4}),
            "InternVLVideoProcessor",
            named={
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
        ),
        Toy(
            *("smolvlm", "<image>", "<image>"),
            ("SmolVLMImageProcessor", _IDEFICS),
            ("SmolVLMProcessor", {"image_seq_len": 4}),
            "SmolVLMVideoProcessor",
            template=LISTS,
        ),
        Toy(
            *("idefics3", "<image>", "<image>"),
            ("Idefics3ImageProcessor", _IDEFICS),
            ("Idefics3Processor", {"image_seq_len": 4}),
            template=LISTS,
        ),
    )
}


REMOTE_TOYS: dict[str, Toy] = {
    "nemotron_nano_vl": Toy(
        *("nemotron_nano_vl", "<image>", "<image>"),
        (
            "NemotronNanoVLV2ImageProcessor",
            {
                "auto_map": {
                    "AutoImageProcessor": "image_processing.NemotronNanoVLV2ImageProcessor"
                },
                "image_size": 16,
                "patch_size": 4,
                "max_num_tiles": 4,
                "norm_mean": [0.48, 0.46, 0.41],
                "norm_std": [0.27, 0.26, 0.28],
            },
        ),
        ("NemotronNanoVLV2Processor", {}),
    )
}
"""Those whose processors are remote code on the hub."""


def make_tokenizer(toy: Toy) -> Any:
    """Bytes and special tokens."""
    template = toy.template.replace("MARK", toy.mark).replace("FILM", toy.film) or None
    named = {"extra_special_tokens": toy.named} if toy.named else {}
    return byte_tokenizer(SPECIAL, chat_template=template, bos_token="<bos>", **named)


def byte_tokenizer(special: tuple[str, ...], **options: Any) -> Any:
    """A tokenizer of bytes, ``special`` tokens, and further ``options`` of transformers' class."""
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
    known = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**known, **options})


def image_processor(toy: Toy) -> Any:
    """The image processor, of the backend that is installed."""
    import transformers
    from transformers.utils import is_torchvision_available

    name, options = toy.images
    return getattr(transformers, name if is_torchvision_available() else f"{name}Pil")(**options)


def hf_config(toy: Toy, tokenizer: Any, **changes: Any) -> Any:
    """The config of the row's model with the ids of ``tokenizer``."""
    row = ROWS[toy.row]
    config = json.loads(json.dumps(row.config))
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    config[key] = tokenizer.convert_tokens_to_ids(toy.image)
    for other in ("video_token_id", "video_token_index"):
        if other in config:
            has_other_token = toy.film == "<|video|>"
            token = toy.film if has_other_token else "<|video_pad|>"
            config[other] = tokenizer.convert_tokens_to_ids(token)
    config["text_config"] |= {"vocab_size": VOCABULARY, "max_position_embeddings": 512, **toy.text}
    for key in ("boi_token", "eoi_token"):
        if key in toy.named and "boi_token_id" in model_class(row.model).config_class().to_dict():
            config[f"{key}_id"] = tokenizer.convert_tokens_to_ids(toy.named[key])
    config |= changes
    found = model_class(row.model).config_class(**config)
    found.architectures = [row.model]
    return found


def save(name: str, folder: Path, weights: bool = False, **changes: Any) -> Path:
    """Write the toy ``name``; returns ``folder``."""
    toy = {**TOYS, **REMOTE_TOYS}[name]
    tokenizer, config = make_tokenizer(toy), None
    config = hf_config(toy, tokenizer, **changes)
    if weights:
        torch.manual_seed(0)
        model = model_class(ROWS[name].model)(config)
        for parameter in model.parameters():
            if (
                not parameter.any()
            ):  # as Gemma 3's projection starts: no image would change anything
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name in TOYS:
        image_processor(toy).save_pretrained(folder)
    else:
        said = {"image_processor_type": toy.images[0], **toy.images[1]}
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
    values = {"processor_class": toy.processor[0], **toy.processor[1]}
    path = folder / "processor_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if toy.video_options:
        values["video_processor"] = {"video_processor_type": toy.videos, **toy.video_options}
    path.write_text(json.dumps({**known, **values}))
    return folder


def composite(name: str, folder: Path) -> Any:
    """Transformers' own processor of the toy in ``folder``."""
    import importlib

    import transformers

    toy = TOYS[name]
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    if toy.videos:
        parts["video_processor"] = getattr(transformers, toy.videos)()
    if toy.audio:
        parts["feature_extractor"] = getattr(transformers, toy.audio)()
    module = importlib.import_module(getattr(transformers, toy.processor[0]).__module__)
    return getattr(module, toy.processor[0])(**parts, **toy.processor[1])


def greedy_answer(
    folder: Path, ids: Any, inputs: dict[str, Any], count: int
) -> tuple[list[int], list[float]]:
    """Transformers' ``count`` tokens behind ``ids`` [1, sequence], and their log-probabilities."""
    import inspect

    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    known = {*inspect.signature(model.forward).parameters} - {"input_ids", "attention_mask"}
    found = model.generate(
        input_ids=ids,
        **{name: value for name, value in inputs.items() if name in known},
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = found.sequences[0, ids.shape[1] :].tolist()
    return tokens, [
        float(one[0].log_softmax(-1)[token])
        for one, token in zip(found.logits, tokens, strict=True)
    ]


def picture(folder: Path, name: str, width: int, height: int, seed: int = 0) -> str:
    """Write a smooth picture, which resizing changes little; returns its name."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / name)
    return name


def film(folder: Path, name: str, width: int, height: int, *, frames: int, fps: int) -> str:
    """Write a smooth video, which needs PyAV; returns its name."""
    import av
    from PIL import Image

    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture(folder, "frame.png", width, height, number)
            frame = av.VideoFrame.from_image(Image.open(folder / "frame.png"))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return name
