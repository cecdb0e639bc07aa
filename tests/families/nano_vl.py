# SPDX-License-Identifier: Apache-2.0
"""A plain Nemotron Nano VL v2, under the names of its checkpoints: RADIO in a page, and transformers' Nemotron-H."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, NemotronHForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput

from megatron.bridge.models.hf_pretrained.remote_configs import NanoVLConfig


class NemotronH_Nano_VL_V2(PreTrainedModel, GenerationMixin):
    """Tiles go through the tower; four neighboring patches become one token, which replaces ``<image>``."""

    config_class = NanoVLConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision, text = config.vision_config, config.text_config
        self.vision_model = nn.ModuleDict({"radio_model": Radio(vision)})
        self.mlp1 = nn.Sequential(
            RMSNorm(4 * vision.hidden_size),
            nn.Linear(4 * vision.hidden_size, config.projector_hidden_size, bias=False),
            SquaredReLU(),
            nn.Linear(config.projector_hidden_size, text.hidden_size, bias=False),
        )
        self.language_model = NemotronHForCausalLM(text)
        self.post_init()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, **options: Any
    ) -> CausalLMOutput:
        """Logits of samples; ``pixel_values`` are the tiles of all their images."""
        assert options.pop("inputs_embeds", None) is None
        embedded = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            features = self.mlp1(shuffled(self.vision_model["radio_model"](pixel_values)))
            place = (input_ids == self.config.image_token_id)[..., None].expand_as(embedded)
            embedded = embedded.masked_scatter(place, features)
        return CausalLMOutput(logits=self.language_model(inputs_embeds=embedded, **options).logits)


def shuffled(grid: Tensor) -> Tensor:
    """[tiles, rows, columns, width] -> [tiles, tokens, 4 x width]: the patches of a square, row by row."""
    tiles, rows, columns, width = grid.shape
    squares = grid.reshape(tiles, rows // 2, 2, columns // 2, 2, width).permute(0, 1, 3, 2, 4, 5)
    return squares.reshape(tiles, -1, 4 * width)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Radio(nn.Module):
    """The tower: patches with positions behind some tokens of its own, in blocks of attention and an MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "patch_generator": PatchGenerator(config),
                "blocks": nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)]),
            }
        )
        # the remote code stores these and does not use them here: pixels are normalised by the image processor
        conditioner = nn.Module()
        conditioner.register_buffer("norm_mean", torch.rand(3, 1, 1))
        conditioner.register_buffer("norm_std", torch.rand(3, 1, 1))
        self.input_conditioner = conditioner
        self.register_buffer("summary_idxs", torch.tensor([0, 1]))

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [tiles, rows, columns, width]."""
        generator = self.model["patch_generator"]
        x = generator(pixels)
        for block in self.model["blocks"]:
            x = block(x)
        rows = pixels.shape[-2] // generator.patch
        return x[:, len(generator.cls_token["token"]) :].unflatten(1, (rows, -1))


class PatchGenerator(nn.Module):
    """Patches, and positions that are a square of learned ones, made smaller and then cut."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch, self.side = config.patch_size, config.max_img_size // config.patch_size
        self.embedder = nn.Linear(3 * self.patch**2, config.hidden_size, bias=False)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side**2, config.hidden_size))
        tokens = config.num_cls_tokens + config.num_registers
        self.cls_token = nn.ParameterDict(
            {"token": nn.Parameter(torch.zeros(tokens, config.hidden_size))}
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embedder(F.unfold(pixels, self.patch, stride=self.patch).mT)
        rows, columns = (length // self.patch for length in pixels.shape[-2:])
        longer = max(rows, columns)
        square = self.pos_embed.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        square = F.interpolate(square, size=(longer, longer), mode="bilinear", align_corners=False)
        x = x + square[..., :rows, :columns].flatten(2).mT
        return torch.cat((self.cls_token["token"].expand(len(x), -1, -1), x), dim=1)


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.activation = ACT2FN[config.hidden_act]
        wide = int(width * config.mlp_ratio)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, wide), "fc2": nn.Linear(wide, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.attn["qkv"](self.norm1(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.attn["proj"]((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](self.activation(self.mlp["fc1"](self.norm2(x))))
