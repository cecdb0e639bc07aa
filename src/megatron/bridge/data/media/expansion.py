# SPDX-License-Identifier: Apache-2.0
"""The text that each family writes in place of an image, and its number of image tokens.

A chat template writes one placeholder for an image. Transformers' processors replace it with text that depends on the
size of the image; the rules here compute the same text from the size alone.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.bridge.utils.errors import UserError

Values = Mapping[str, Any]
Grid = tuple[int, int, int]


class Expansion:
    """The image text of one family, from ``config.json`` and ``processor_config.json``, which takes precedence."""

    options: ClassVar[
        Mapping[str, Any]
    ] = {}  # of the processor, as transformers' of the family passes them
    images_in_sample: int | None = None  # images that a sample may have; None for any number
    template: ClassVar[str | None] = None  # the chat template of checkpoints that have none
    has_patches: ClassVar[bool] = (
        False  # whether tensors hold the patches of one image after another, not of tiles
    )

    def __init__(self, processor: Any, values: Values, hf: Any) -> None:
        self.processor = processor
        self.values = values
        self.hf = hf
        older = values.get("image_token_index", values.get("img_context_token_id"))
        self.token_id: int = values.get("image_token_id", older)
        self.token: str = hf.convert_ids_to_tokens(self.token_id)
        self.placeholder = self.token

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self.options

    def text(self, height: int, width: int) -> str:
        return self.token * self.count(height, width)

    def count(self, height: int, width: int) -> int:
        """Number of tokens that the tower's features replace."""
        raise NotImplementedError

    def tiles(self, height: int, width: int) -> int:
        """Number of entries of an image in its tensors, if these are not patches."""
        return 1

    def grid(self, height: int, width: int) -> Grid | None:
        """Frames, height and width in patches; None where positions have one axis."""
        return None

    def named(self, attribute: str, default: str) -> str:
        """A special token, by the attribute that the tokenizer may have for it."""
        return getattr(self.hf, attribute, None) or default


class QwenPatches(Expansion):
    """Qwen2-VL to Qwen3.6: as many tokens as the resized image has groups of patches."""

    has_patches = True

    def grid(self, height: int, width: int) -> Grid:
        resized = self._resized(height, width)
        return (1, *(side // self.processor.patch_size for side in resized))

    def count(self, height: int, width: int) -> int:
        return math.prod(self.grid(height, width)) // self.processor.merge_size**2

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self.processor.size
        return smart_resize(
            height, width, self._factor, size["shortest_edge"], size["longest_edge"]
        )

    @property
    def _factor(self) -> int:
        return self.processor.patch_size * self.processor.merge_size


class GlmPatches(QwenPatches):
    """GLM-4.1V to GLM-4.6V: the limits count the pixels of two frames."""

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

        frames = self.processor.temporal_patch_size
        size = self.processor.size
        return smart_resize(
            *(frames, height, width, frames, self._factor),
            size["shortest_edge"],
            size["longest_edge"],
        )


class Gemma(Expansion):
    """Gemma 3: each image is resized to a square and has the same number of tokens."""

    options: ClassVar[Mapping[str, Any]] = {"do_pan_and_scan": False}

    def __init__(self, processor: Any, values: Values, hf: Any) -> None:
        super().__init__(processor, values, hf)
        if values.get("do_pan_and_scan") or getattr(processor, "do_pan_and_scan", None):
            raise UserError(
                "do_pan_and_scan=True of preprocessor_config.json crops images, which is not supported: set it to false"
            )
        self.placeholder = self.named("boi_token", "<start_of_image>")

    def count(self, height: int, width: int) -> int:
        return self.values.get("image_seq_length") or self.values["mm_tokens_per_image"]

    def text(self, height: int, width: int) -> str:
        end = self.named("eoi_token", "<end_of_image>")
        return f"\n\n{self.placeholder}{super().text(height, width)}{end}\n\n"


class Gemma4(Expansion):
    """Gemma 4: an image is resized, in its proportions, to at most a number of tokens."""

    def count(self, height: int, width: int) -> int:
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        images = self.processor
        merged = images.pooling_kernel_size
        sides = get_aspect_ratio_preserving_size(
            height,
            width,
            patch_size=images.patch_size,
            max_patches=images.max_soft_tokens * merged**2,
            pooling_kernel_size=merged,
        )
        return math.prod(side // images.patch_size for side in sides) // merged**2

    def text(self, height: int, width: int) -> str:
        start, end = (
            self.named(name, self.hf.convert_ids_to_tokens(self.values[f"{name}_id"]))
            for name in ("boi_token", "eoi_token")
        )
        return f"{start}{super().text(height, width)}{end}"


class PaliGemma(Expansion):
    """PaliGemma: each image has the same number of tokens; ``<bos>`` follows the last one."""

    template = (
        "{% if messages | length > 2 or messages[0]['role'] != 'user' %}"
        "{{ raise_exception('PaliGemma takes one question and one answer') }}{% endif %}"
        "{% set left = namespace(images=messages[0]['content'] | selectattr('type', 'eq', 'image') | list | length) %}"
        "{{ '' if left.images else bos_token }}{% for part in messages[0]['content'] %}"
        "{% if part['type'] == 'image' %}{% set left.images = left.images - 1 %}<image>"
        "{{ '' if left.images else bos_token }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}"
        "{% for message in messages[1:] %}{{ message['content'][0]['text'] }}{{ eos_token }}{% endfor %}"
    )

    def count(self, height: int, width: int) -> int:
        vision = self.values["vision_config"]
        return (vision["image_size"] // vision["patch_size"]) ** 2


class NemotronOmni(Expansion):
    """Nemotron Omni: as many tokens as the resized image has groups of patches, between two tokens."""

    has_patches = True

    def count(self, height: int, width: int) -> int:
        from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import (
            get_patch_grid_size,
        )

        images = self.processor
        merge = round(1 / self.processor.downsample_ratio)
        max_patches = (images.max_model_len - 4) * merge**2
        max_patches = max(
            min(max_patches, images.max_num_patches or max_patches), images.min_num_patches
        )
        grid = get_patch_grid_size(
            height, width, images.patch_size, merge, images.min_num_patches, max_patches
        )
        return math.prod(grid) // merge**2

    def text(self, height: int, width: int) -> str:
        start = self.named("image_start_token", "<img>")
        end = self.named("image_end_token", "</img>")
        return f"{start}{super().text(height, width)}{end}"


class NemotronTiles(Expansion):
    """Nemotron Nano VL v2: tiles of one size, between two tokens."""

    def tiles(self, height: int, width: int) -> int:
        return self.processor.count(height, width)

    def count(self, height: int, width: int) -> int:
        return self.processor.tokens * self.tiles(height, width)

    def text(self, height: int, width: int) -> str:
        start = self.values.get("img_start_token", "<img>")
        end = self.values.get("img_end_token", "</img>")
        return f"{start}{super().text(height, width)}{end}"


class Pixtral(Expansion):
    """Mistral 3: rows of tokens, each followed by a special token."""

    def __init__(self, processor: Any, values: Values, hf: Any) -> None:
        super().__init__(processor, values, hf)
        vision = values.get("vision_config", {})
        patch = values.get("patch_size") or vision["patch_size"]
        self.unit = patch * values.get("spatial_merge_size", 1)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"patch_size": self.unit}

    def _rows(self, height: int, width: int) -> tuple[int, int]:
        edge = self.processor.size["longest_edge"]
        ratio = max(height / edge, width / edge)
        sides = [math.floor(side / ratio) if ratio > 1 else side for side in (height, width)]
        rows, columns = ((side - 1) // self.unit + 1 for side in sides)
        return rows, columns

    def count(self, height: int, width: int) -> int:
        return math.prod(self._rows(height, width))

    def text(self, height: int, width: int) -> str:
        rows, columns = self._rows(height, width)
        line = self.token * columns
        middle = self.values.get("image_break_token", "[IMG_BREAK]")
        return middle.join([line] * rows) + self.values.get("image_end_token", "[IMG_END]")


class Llava(Expansion):
    """Llava 1.5: each image has the tower's size."""

    def count(self, height: int, width: int) -> int:
        size = (
            self.processor.crop_size
            if getattr(self.processor, "do_center_crop", None)
            else self.processor.size
        )
        patches = (size["height"] // self._patch) * (size["width"] // self._patch)
        return patches + self._extra - self._without_class

    @property
    def _patch(self) -> int:
        return self.values.get("patch_size") or self.values["vision_config"]["patch_size"]

    @property
    def _extra(self) -> int:
        """Tokens of the tower other than patches: CLIP has a class token."""
        if (given := self.values.get("num_additional_image_tokens")) is not None:
            return given
        return int(self.values["vision_config"].get("model_type") == "clip_vision_model")

    @property
    def _without_class(self) -> int:
        return int(self.values.get("vision_feature_select_strategy", "default") == "default")


class LlavaNext(Llava):
    """Llava-NeXT: the full image resized, and tiles without padding."""

    def count(self, height: int, width: int) -> int:
        side = self._tile
        patches = side // self._patch
        return (
            self._tiled(height, width, side, patches)
            + patches**2
            + self._extra
            - self._without_class
        )

    @property
    def _tile(self) -> int:
        size = self.processor.size
        return (
            size["shortest_edge"]
            if size.get("shortest_edge")
            else min(size["height"], size["width"])
        )

    def _tiled(self, height: int, width: int, side: int, patches: int) -> int:
        rows, columns = self._unpadded(height, width, side, patches)
        return rows * (columns + 1)  # one more for the end of each row

    def _unpadded(self, height: int, width: int, side: int, patches: int) -> tuple[int, int]:
        from transformers.image_processing_utils import select_best_resolution

        best = select_best_resolution((height, width), self.processor.image_grid_pinpoints)
        rows, columns = (patches * (length // side) for length in best)
        if width / height > columns / rows:
            rows -= (rows - round(height * (columns / width), 7).__trunc__()) // 2 * 2
        else:
            columns -= (columns - round(width * (rows / height), 7).__trunc__()) // 2 * 2
        return rows, columns


class LlavaOneVision(LlavaNext):
    """Llava-OneVision: like Llava-NeXT, shrunk above a number of tiles; several images are encoded differently."""

    images_in_sample = 1

    def count(self, height: int, width: int) -> int:
        patches = math.isqrt(self._per_tile)
        return (
            self._tiled(height, width, self._tile, patches) + self._per_tile - self._without_class
        )

    @property
    def _per_tile(self) -> int:
        vision = self.values["vision_config"]
        return (
            self.values.get("num_image_tokens")
            or (vision["image_size"] // vision["patch_size"]) ** 2
        )

    @property
    def _without_class(self) -> int:
        return int(self.values.get("vision_feature_select_strategy", "full") == "default")

    def _unpadded(self, height: int, width: int, side: int, patches: int) -> tuple[int, int]:
        rows, columns = super()._unpadded(height, width, side, patches)
        max_tiles = int(
            self.values.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")
        )
        ratio = math.sqrt(rows * columns / (max_tiles * patches**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


class InternVL(Expansion):
    """InternVL: tiles of one size, between two tokens."""

    options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}

    def tiles(self, height: int, width: int) -> int:
        return self.processor.get_number_of_image_patches(height, width, dict(self.options))

    def count(self, height: int, width: int) -> int:
        return self._per_tile * self.tiles(height, width)

    @property
    def _per_tile(self) -> int:
        return self.values.get("image_seq_length", 256)

    def text(self, height: int, width: int) -> str:
        start = self.named("start_image_token", "<img>")
        end = self.named("end_image_token", "</img>")
        return f"{start}{super().text(height, width)}{end}"


class Idefics(Expansion):
    """Idefics3 and SmolVLM: tiles with their row and column as text, followed by the full image."""

    options: ClassVar[Mapping[str, Any]] = {"return_row_col_info": True}

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        if not self.processor.do_image_splitting:
            return 0, 0
        _, rows, columns = self.processor.get_number_of_image_patches(height, width, {})
        return (rows, columns) if rows * columns > 1 else (0, 0)

    @property
    def _per_tile(self) -> int:
        return self.values.get("image_seq_len", 169)

    def tiles(self, height: int, width: int) -> int:
        return math.prod(self._tiles(height, width)) + 1

    def count(self, height: int, width: int) -> int:
        return self._per_tile * self.tiles(height, width)

    def text(self, height: int, width: int) -> str:
        around = self.named("fake_image_token", "<fake_token_around_image>")
        tokens, (rows, columns) = self.token * self._per_tile, self._tiles(height, width)
        lines = [
            "".join(f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1))
            + "\n"
            for row in range(1, rows + 1)
        ]
        global_image = f"{around}{self.named('global_image_token', '<global-img>')}{tokens}{around}"
        return "".join(lines) + ("\n" if lines else "") + global_image


QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families with Qwen2-VL's patches, in which videos have a separate token."""

GEMMA4 = ("gemma4", "gemma4_unified")
"""Families with padded patches, whose videos have a separate token and are not divided among ranks."""

GLM = ("glm4v", "glm46v", "glm4v_moe")
"""Families of GLM, in whose videos frames are images."""

EXPANSIONS: Mapping[str, type[Expansion]] = {
    **dict.fromkeys(QWEN, QwenPatches),
    **dict.fromkeys(GLM, GlmPatches),
    **dict.fromkeys(("idefics3", "smolvlm"), Idefics),
    "gemma3": Gemma,
    **dict.fromkeys(GEMMA4, Gemma4),
    "paligemma": PaliGemma,
    "nemotron_h_omni": NemotronOmni,
    "NemotronH_Nano_VL_V2": NemotronTiles,
    "mistral3": Pixtral,
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOneVision,
    "internvl": InternVL,
}
"""``model_type`` of ``config.json`` -> its rule."""
