# SPDX-License-Identifier: Apache-2.0
"""Audio as a model takes it: expanded placeholders before tokenizing, spectrograms when a batch is made.

Spectrograms are computed by the feature extractor of the checkpoint, with the arguments of transformers' processor of
the family.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron.bridge.data.media.audio_files import decode_audio, refer_audio, resampled_length
from megatron.bridge.data.media.media_rules import MediaRules, loading
from megatron.bridge.data.media.processor import MediaProcessor, hash_of
from megatron.bridge.data.media.processor_files import chat_template
from megatron.bridge.data.media.references import AudioReference, MediaReference, shown
from megatron.bridge.models.vision.audio import tokens_of_stretch
from megatron.bridge.models.vision.media import share_out
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AudioRule:
    """How one family takes a recording: as entries of equal length, each with a number of tokens."""

    template: ClassVar[str]
    """The chat template of checkpoints that have none."""

    def __init__(self, extractor: Any, config: Mapping[str, Any]) -> None:
        self.extractor = extractor
        self.config = config

    def count(self, samples: int) -> int:
        """Number of tokens of a recording with ``samples`` samples."""
        raise NotImplementedError

    def entries(self, samples: int) -> int:
        """Number of entries of a recording in its tensors."""
        raise NotImplementedError

    def tensors(self, waveform: np.ndarray) -> dict[str, Tensor]:
        """The tensors [entries, ...] of a recording under transformers' names."""
        raise NotImplementedError

    def blank(self, samples: int) -> dict[str, Tensor]:
        """Tensors in the shapes of ``tensors`` that take no memory."""
        bins, frames = self.extractor.feature_size, self.extractor.nb_max_frames
        return {"input_features": torch.zeros(()).expand(self.entries(samples), bins, frames)}


class Qwen2AudioRule(AudioRule):
    """Qwen2-Audio: one entry, whose padding has no tokens. Longer recordings are refused, transformers cuts them."""

    template = (
        "{% set heard = namespace(count=0) %}{% for message in messages %}"
        "{% if loop.first and message['role'] != 'system' %}"
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
        "{% set heard.count = heard.count + 1 %}Audio {{ heard.count }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
        "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def count(self, samples: int) -> int:
        frames = -(-samples // self.extractor.hop_length)
        encoded = (frames - 1) // 2 + 1
        return (encoded - 2) // 2 + 1  # pairs are averaged

    def entries(self, samples: int) -> int:
        if samples > self.extractor.n_samples:
            seconds = self.extractor.chunk_length
            raise UserError(
                f"it is longer than the {seconds} seconds that the model takes: split it"
            )
        return 1

    def tensors(self, waveform: np.ndarray) -> dict[str, Tensor]:
        outputs = self.extractor(
            waveform,
            sampling_rate=self.extractor.sampling_rate,
            return_attention_mask=True,
            padding="max_length",
            return_tensors="pt",
        )
        return {
            "input_features": outputs["input_features"],
            "feature_attention_mask": outputs["attention_mask"],
        }

    def blank(self, samples: int) -> dict[str, Tensor]:
        frames = -(-samples // self.extractor.hop_length)
        is_sound = torch.arange(self.extractor.nb_max_frames) < frames
        return super().blank(samples) | {"feature_attention_mask": is_sound[None].to(torch.int32)}


class VoxtralRule(AudioRule):
    """Voxtral: stretches of 30 seconds, the last one padded with silence; all of them have the same tokens."""

    template = (
        "{{ bos_token | default('<s>', true) }}{% for message in messages %}"
        "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]"
        "{% elif message['role'] == 'user' %}[INST]{% endif %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% endif %}{% if message['role'] == 'system' %}[/SYSTEM_PROMPT]{% elif message['role'] == 'user' %}[/INST]"
        "{% else %}{{ eos_token | default('</s>', true) }}{% endif %}{% endfor %}"
    )

    def count(self, samples: int) -> int:
        return self.entries(samples) * tokens_of_stretch(self.config)

    def entries(self, samples: int) -> int:
        return -(-samples // self.extractor.n_samples)

    def tensors(self, waveform: np.ndarray) -> dict[str, Tensor]:
        extractor = self.extractor
        outputs = extractor(
            waveform,
            sampling_rate=extractor.sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=extractor.n_samples,
            return_tensors="pt",
        )
        stretches = outputs["input_features"].reshape(
            extractor.feature_size, -1, extractor.nb_max_frames
        )
        return {"input_features": stretches.transpose(0, 1)}


AUDIO_RULES: Mapping[str, type[AudioRule]] = {"qwen2_audio": Qwen2AudioRule, "voxtral": VoxtralRule}
"""``model_type`` of ``config.json`` -> its rule."""

_OF_IMAGES = ("min_pixels", "max_pixels", "fps", "max_frames")


class AudioProcessor(MediaProcessor):
    """The audio of a run; a special token of the tokenizer ``hf`` is the placeholder."""

    def __init__(
        self, rules: MediaRules, hf: "PreTrainedTokenizerBase", config: Mapping[str, Any]
    ) -> None:
        super().__init__(rules)
        self.kind = config["model_type"]
        for name in _OF_IMAGES:
            if (value := getattr(rules, name)) is not None:
                raise UserError(
                    f"dataset.{name}={value} is a limit of images and videos, and {self.kind} takes audio: leave it "
                    "unset"
                )
        token_id = config.get("audio_token_id", config.get("audio_token_index"))
        if token_id is None:
            raise UserError(
                f"config.json of {rules.processor_path} has no audio_token_id: set it to the placeholder of audio"
            )
        self.token_ids = [token_id]
        self.token = str(hf.convert_ids_to_tokens(token_id))
        self.extractor = _load_extractor(rules.processor_path, config["audio_config"])
        self.rule = AUDIO_RULES[self.kind](self.extractor, config)
        self.chat_template = chat_template(rules.processor_path) or (
            None if hf.chat_template else self.rule.template
        )

    def placeholder(self, media: MediaReference | None = None) -> str:
        return self.token

    def description(self, has_videos: bool) -> str:
        return f"audio by {type(self.extractor).__name__}, {self.extractor.sampling_rate:,} samples per second"

    def key(self) -> str:
        values = [self.kind, self.extractor.to_dict(), self.rule.count(self.extractor.n_samples)]
        return hash_of([*values, str(self.root), self.max_image_tokens, self.chat_template])

    def references(self, named: Iterable[tuple[str, Any]], location: str) -> list[MediaReference]:
        references: list[MediaReference] = []
        for kind, raw in self.fetched(named, location):
            if kind != "audio":
                raise UserError(
                    f"{location}: the record has {'an image' if kind == 'image' else 'a video'}, and {self.kind} "
                    "takes audio only: remove it"
                )
            audio = refer_audio(raw, self.root, location)
            self._check_length(audio)
            references.append(audio)
        return references

    def text(self, media: MediaReference) -> str:
        return self.token * self.tokens(media)

    def tokens(self, media: MediaReference) -> int:
        return self.rule.count(self._samples(media))

    def pixels(self, media: Sequence[MediaReference]) -> dict[str, Tensor]:
        parts = [
            self._tensors(audio, is_local)
            for audio, is_local in zip(media, self._encoded_here(media), strict=True)
        ]
        names = parts[0] if parts else ()
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    def _encoded_here(self, media: Sequence[MediaReference]) -> list[bool]:
        """Of each recording whether this rank encodes a part of it: entries are shared out as the tower does it."""
        rank, ranks = self.share or (0, 1)
        entries = [self.rule.entries(self._samples(audio)) for audio in media]
        owners = iter(share_out([1] * sum(entries), ranks) if entries else ())
        return [rank in [next(owners) for _ in range(count)] for count in entries]

    def _tensors(self, audio: MediaReference, is_local: bool) -> dict[str, Tensor]:
        assert isinstance(audio, AudioReference), audio
        if not is_local:
            return self.rule.blank(self._samples(audio))
        return self.rule.tensors(decode_audio(audio, self.extractor.sampling_rate))

    def _samples(self, audio: MediaReference) -> int:
        assert isinstance(audio, AudioReference), audio
        return resampled_length(audio, self.extractor.sampling_rate)

    def _check_length(self, audio: AudioReference) -> None:
        samples = self._samples(audio)
        name = f"{audio.where}: the audio {shown(audio.source)} with {audio.seconds:.3g} seconds"
        try:
            self.rule.entries(samples)
        except UserError as error:
            raise UserError(f"{name} cannot be used: {error}") from error
        if self.rule.count(samples) < 1:
            raise UserError(f"{name} is too short for a single token: remove the record")


def _load_extractor(path: str, audio_config: Mapping[str, Any]) -> Any:
    from transformers import AutoFeatureExtractor

    with loading(path, "feature extractor for audio that can be loaded"):
        extractor: Any = AutoFeatureExtractor.from_pretrained(path)
        frames = extractor.nb_max_frames
    expected = 2 * audio_config["max_source_positions"]  # a convolution halves them
    if frames != expected or extractor.n_samples != frames * extractor.hop_length:
        raise UserError(
            f"preprocessor_config.json of {path} makes spectrograms of {frames} frames, and audio_config."
            f"max_source_positions={audio_config['max_source_positions']} needs {expected}: correct chunk_length or "
            "hop_length"
        )
    if extractor.feature_size != audio_config["num_mel_bins"]:
        raise UserError(
            f"preprocessor_config.json of {path} has feature_size={extractor.feature_size}, and "
            f"audio_config.num_mel_bins={audio_config['num_mel_bins']}: make them equal"
        )
    return extractor
