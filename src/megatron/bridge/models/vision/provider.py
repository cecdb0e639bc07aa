# SPDX-License-Identifier: Apache-2.0
"""The provider of a decoder with a vision tower, and its positions on three axes."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.models.vision import radio
from megatron.bridge.models.vision import tower as towers
from megatron.bridge.models.vision.model import VisionGPTModel, VisionHybridModel, WithVision
from megatron.bridge.models.vision.tower import dummy_media, unused_parameters
from megatron.bridge.utils.errors import UserError


class MultimodalRotary(nn.Module):
    """Angles of three-dimensional positions, with the frequencies of a one-dimensional embedding.

    Megatron-Core's own class has no interleaved sections, and slices packed rows wrongly under context parallelism.
    Here, positions of a packed row are those of the full row, from which Megatron-Core takes each rank's part; those
    of other rows are already this rank's.

    ``sections`` are the numbers of frequencies for time, height and width. With ``interleaved``, the axes alternate, as
    in Qwen3-VL; else each has a block of frequencies.
    """

    def __init__(self, plain: Any, sections: list[int], interleaved: bool) -> None:
        super().__init__()
        count = len(plain.inv_freq)
        if len(sections) != 3 or (sum(sections) != count):
            raise UserError(
                f"mrope_section={sections} must be three numbers that sum up to {count}, half of the rotated head "
                "dimensions"
            )
        self.inv_freq: Tensor = plain.inv_freq
        self.pairs = bool(plain.rotary_interleaved)
        self.axes = axes_of(sections, interleaved)

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Angles [s, b, 1, rotated dimension] of positions [3, b, s], or [b, s] where the axes are equal."""
        if position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        chosen = position_ids[self.axes.to(position_ids.device)]
        angles = chosen.permute(2, 1, 0).float() * self.inv_freq.to(chosen.device)
        both = (
            torch.stack((angles, angles), dim=-1).flatten(-2)
            if self.pairs
            else torch.cat((angles, angles), -1)
        )
        return both[:, :, None]


def axes_of(sections: list[int], interleaved: bool) -> Tensor:
    """The axis (0 time, 1 height, 2 width) of each frequency.

    Example:
        >>> axes_of([1, 1, 2], interleaved=False).tolist()
        [0, 1, 2, 2]
        >>> axes_of([3, 1, 1], interleaved=True).tolist()
        [0, 1, 2, 0, 0]
    """
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        turns = {
            frequency: axis for axis in (1, 2) for frequency in range(axis, 3 * sections[axis], 3)
        }
        axes = [turns.get(frequency, 0) for frequency in range(sum(sections))]
    return torch.tensor(
        axes, device="cpu"
    )  # numbers, even while the model is built on the meta device


PROJECTORS = (
    "merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "connector",
    "embed_vision",
    "image_newline",
)
"""Modules between tower and decoder: ``freeze_vision_projection``."""


@dataclass
class VisionGPTModelProvider(GPTModelProvider):
    """A ``GPTModelProvider`` with transformers' vision tower on the first pipeline stage."""

    _model_class: ClassVar[type[Any]] = VisionGPTModel

    vision: dict[str, Any] | None = (
        None  # Hugging Face's config without its text model; None builds that alone
    )
    deallocate_pipeline_outputs: bool = (
        False  # a stage of deepstack sends a view, whose memory cannot be freed
    )
    mrope_interleaved: bool = (
        False  # the axes of ``mrope_section`` take turns (Qwen3-VL), or each has a block
    )
    freeze_language_model: bool = False  # train the tower and its projector only
    freeze_vision_model: bool = False  # leave the tower as it is; its projector is trained
    freeze_vision_projection: bool = False  # leave what lies between tower and decoder as it is
    bidirectional_images: bool = (
        False  # the tokens of an image attend to each other both ways (Gemma 3 and 4)
    )
    bidirectional_full_layers: bool = (
        True  # layers without a window attend both ways, too (not in Gemma 4)
    )
    bidirectional_prompt: bool = (
        False  # tokens before the first trained one attend both ways (PaliGemma)
    )
    recompute_vision_model: bool = (
        False  # keep only the inputs of the tower's layers for the backward pass
    )
    share_images: bool = (
        True  # ranks of tensor and context groups each encode a part, else each encodes all
    )

    @property
    def looks_ahead(self) -> bool:
        """Whether some tokens see others behind them."""
        return self.bidirectional_images or self.bidirectional_prompt

    @property
    def image_token_id(self) -> int | None:
        """The placeholder of an image."""
        return self._token("image_token_id", "image_token_index")

    @property
    def video_token_id(self) -> int | None:
        """The placeholder of a video; None if the family has none."""
        return self._token("video_token_id", "video_token_index")

    @property
    def audio_token_id(self) -> int | None:
        """The placeholder of audio; None if the family has none."""
        return self._token("audio_token_id", "audio_token_index")

    @property
    def placeholders(self) -> tuple[int | None, int | None, int | None]:
        """The placeholders of an image, a video and audio."""
        return self.image_token_id, self.video_token_id, self.audio_token_id

    def _token(self, *keys: str) -> int | None:
        return (
            next((self.vision[key] for key in keys if key in self.vision), None)
            if self.vision
            else None
        )

    @property
    def deep_layers(self) -> int:
        """Layers of the decoder after which features are added."""
        return len(
            ((self.vision or {}).get("vision_config") or {}).get("deepstack_visual_indexes") or ()
        )

    def derive(self) -> None:
        """Check the settings that vision and rotary embeddings require."""
        super().derive()
        if self.mrope_section is not None:
            self._check_mrope()
        if self.looks_ahead and self.backend == "transformer_engine":
            raise UserError(
                "backend='transformer_engine' cannot let tokens see ahead: set model.backend='torch'"
            )
        if self.deep_layers and self.recompute_granularity == "full":
            raise UserError(
                "recompute_granularity='full' cannot recompute layers that features of images are added behind: "
                "set model.recompute_granularity='selective'"
            )

    def _check_mrope(self) -> None:
        kind = (self.rope_parameters or {}).get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise UserError(
                f"rope_parameters.rope_type={kind!r} does not work with mrope_section: use yarn"
            )
        if self.apply_rope_fusion:
            raise UserError(
                "apply_rope_fusion=True does not work with mrope_section, the kernel counts positions itself: "
                "set model.apply_rope_fusion=False"
            )

    def provide_distributed_model(  # type: ignore[override]
        self, ddp_config: Any = None, wrap_with_ddp: bool = True, **options: Any
    ) -> list[Any]:
        """As ``GPTModelProvider.provide_distributed_model``."""
        if wrap_with_ddp:
            self._check_frozen()
        return super().provide_distributed_model(ddp_config, wrap_with_ddp, **options)

    def _check_frozen(self) -> None:
        if not self.freeze_language_model:
            return
        if self.pipeline_model_parallel_size > 1:
            raise UserError(
                "freeze_language_model=True leaves nothing to train on the later stages of "
                f"pipeline_model_parallel_size={self.pipeline_model_parallel_size}: set "
                "model.pipeline_model_parallel_size=1"
            )
        if self.vision is None or (self.freeze_vision_model and self.freeze_vision_projection):
            raise UserError(
                "freeze_language_model=True leaves nothing to train, because the vision part is frozen: set one of "
                "model.freeze_language_model, freeze_vision_model and freeze_vision_projection to False"
            )

    def finish(self, model: Any) -> None:
        """Add three-axis positions and the tower, and freeze what is not trained."""
        super().finish(model)
        if self.mrope_section is not None:
            model.rotary_pos_emb = MultimodalRotary(
                model.rotary_pos_emb, self.mrope_section, self.mrope_interleaved
            )
            model.position_embedding_type = "mrope"
            model.mrope_section = self.mrope_section
        if self.vision is not None and model.pre_process:
            self._add_tower(model)
        self._freeze(model)

    def _add_tower(self, model: WithVision) -> None:
        assert self.vision is not None
        if (stage_layers := len(model.decoder.layers)) < self.deep_layers:
            raise UserError(
                f"num_layers_in_first_pipeline_stage={stage_layers} is less than the {self.deep_layers} layers that "
                f"features of images are added behind: give the first stage at least {self.deep_layers} layers"
            )
        tower: Any = self._build_tower(self.vision)
        for module in tower.modules():
            if isinstance(module, nn.Linear):
                vars(module)["config"] = model.config  # for adapters
        if self.recompute_vision_model:
            tower._set_gradient_checkpointing(
                gradient_checkpointing_func=partial(checkpoint, use_reentrant=False)
            )
        for name, parameter in tower.named_parameters():
            parameter.average_gradients_across_tp_domain = self.share_images  # type: ignore[attr-defined]
            if name in unused_parameters(tower):  # what transformers freezes stays frozen
                parameter.requires_grad_(False)
        model.add_tower(tower, dummy_media(tower), self.deep_layers)

    def _build_tower(self, vision: dict[str, Any]) -> nn.Module:
        return towers.build_tower(vision, self.params_dtype, bool(self.perform_initialization))

    def _freeze(self, model: Any) -> None:
        frozen = (
            self.freeze_language_model,
            self.freeze_vision_model,
            self.freeze_vision_projection,
        )
        for name, parameter in model.named_parameters():
            if frozen[part_of_model(name)]:
                parameter.requires_grad_(False)


@dataclass
class VisionHybridModelProvider(VisionGPTModelProvider, MambaModelProvider):
    """A ``MambaModelProvider`` with RADIO, as in transformers, on the first pipeline stage."""

    _model_class: ClassVar[type[Any]] = VisionHybridModel

    radio_layer_scales: bool = (
        False  # RADIO's layers scale what they add; not in published checkpoints
    )

    def _build_tower(self, vision: dict[str, Any]) -> nn.Module:
        return radio.as_stored(super()._build_tower(vision), self.radio_layer_scales)


LANGUAGE_MODEL, VISION_MODEL, VISION_PROJECTION = range(3)


def part_of_model(name: str) -> int:
    """Return the part of the model that has the parameter ``name``."""
    path = name.split(".")
    if path[0] != "vision":
        return LANGUAGE_MODEL
    return VISION_PROJECTION if set(path) & set(PROJECTORS) else VISION_MODEL
