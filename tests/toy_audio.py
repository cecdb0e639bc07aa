# SPDX-License-Identifier: Apache-2.0
"""Tiny models that hear with all their files, and recordings for them."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families.vision.rows import AUDIO
from tests.toy_vision import VOCABULARY, byte_tokenizer
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/audio"  # where scripts/extra.sh installs it
if BESIDE.is_dir() and str(BESIDE) not in sys.path:
    sys.path.append(str(BESIDE))

HAS_AUDIO = find_spec("soundfile") is not None and find_spec("soxr") is not None
NO_AUDIO = "no soundfile and soxr: run scripts/extra.sh audio"

ROWS = {row.name: row for row in AUDIO}
RATE = 16_000
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AUDIO]"),
    "[BEGIN_AUDIO]",
)
_TOKENS = {"qwen2_audio": "<|AUDIO|>", "voxtral": "[AUDIO]"}
_NAMED = {
    "qwen2_audio": {"extra_special_tokens": {"audio_token": "<|AUDIO|>"}},
    "voxtral": {"bos_token": "<s>", "eos_token": "</s>"},
}


def hf_config(name: str, tokenizer: Any) -> Any:
    """The config of the row's model for recordings of one second, with the ids of ``tokenizer``."""
    from transformers import AutoConfig

    values = json.loads(json.dumps(ROWS[name].config))
    key = "audio_token_id" if name == "voxtral" else "audio_token_index"
    values[key] = tokenizer.convert_tokens_to_ids(_TOKENS[name])
    values["text_config"] |= {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    values["audio_config"]["max_source_positions"] = 50
    if name == "voxtral":
        values["audio_config"]["intermediate_size"] = 80  # 10 tokens of a second
    config = AutoConfig.for_model(name, **values)
    config.architectures = [ROWS[name].model]
    return config


def save(name: str, folder: Path, weights: bool = False) -> Path:
    """Write the toy ``name``, whose recordings have a second at most or stretches of one; returns ``folder``."""
    import transformers

    tokenizer = byte_tokenizer(SPECIAL, **_NAMED[name])
    config = hf_config(name, tokenizer)
    if weights:
        torch.manual_seed(0)
        getattr(transformers, ROWS[name].model)(config).save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor(name).save_pretrained(folder)
    return folder


def extractor(name: str) -> Any:
    """The feature extractor of the toy: spectrograms of one second."""
    from transformers import WhisperFeatureExtractor

    bins = ROWS[name].config["audio_config"]["num_mel_bins"]
    return WhisperFeatureExtractor(feature_size=bins, chunk_length=1)


def waveform(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """A few tones and some noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * pitch * times) for pitch in rng.uniform(100, 3000, 3))
    return (0.2 * tones + 0.01 * rng.standard_normal(len(times))).astype(np.float32)


def recording(
    folder: Path, name: str, seconds: float, rate: int = RATE, channels: int = 1, seed: int = 0
) -> str:
    """Write a recording in the format of its ending; returns its name."""
    import soundfile

    sound = np.stack([waveform(seconds, rate, seed + one) for one in range(channels)], axis=1)
    soundfile.write(folder / name, sound, rate)
    return name


def their_waveform(path: Path) -> np.ndarray:
    """The waveform of a file at 16 kHz by transformers' ``load_audio``."""
    import soundfile
    import soxr
    from transformers import audio_utils

    # transformers looks for packages once, when it is imported, which may be before `BESIDE` is on the path
    known = {"sf": soundfile, "soxr": soxr, "requires_backends": lambda *_: None}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setattr(audio_utils, name, value, raising=False)
        return audio_utils.load_audio(str(path), RATE, backend="soundfile")


def their_inputs(
    name: str, folder: Path, messages: list[dict[str, Any]], root: Path
) -> dict[str, torch.Tensor]:
    """What transformers' processors make of a conversation.

    Args:
        name: of the toy.
        folder: with its files.
        messages: a question with recordings, and the answer unless it is a prompt.
        root: of the recordings.
    """
    import transformers

    question, *answers = messages
    parts = question["content"]
    sounds = [their_waveform(root / part["audio"]) for part in parts if part["type"] == "audio"]
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    features = transformers.AutoFeatureExtractor.from_pretrained(folder)
    if name == "qwen2_audio":
        processor = transformers.Qwen2AudioProcessor(features, hf)
        text = processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answers
        )
        given = {"audio": sounds, "sampling_rate": RATE} if sounds else {}
        return dict(processor(text=text, return_tensors="pt", **given))
    # the format of mistral-common, whose tokenizer would need a file that the toy does not have
    lengths = iter([-(-len(sound) // RATE) for sound in sounds])
    texts = [
        f"[BEGIN_AUDIO]{10 * next(lengths) * '[AUDIO]'}" if "audio" in part else part["text"]
        for part in parts
    ]
    ends = "".join(f"{answer['content']}</s>" for answer in answers)
    text = f"<s>[INST]{''.join(texts)}[/INST]{ends}"
    inputs = dict(hf(text, add_special_tokens=False, return_tensors="pt"))
    if sounds:
        inputs["input_features"] = voxtral_features(folder, sounds)
    return {key: inputs[key] for key in inputs if key != "token_type_ids"}


def voxtral_features(folder: Path, sounds: list[np.ndarray]) -> torch.Tensor:
    """Spectrograms by transformers' processor, in stretches of a second instead of 30."""
    import transformers

    processor = transformers.VoxtralProcessor(
        transformers.AutoFeatureExtractor.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    options = {**transformers.VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": RATE}
    options["max_source_positions"] = 100
    return processor._retrieve_input_features(sounds, **options)
