# SPDX-License-Identifier: Apache-2.0
"""Let eSpeak NG speak digits in many voices, with questions and answers, and make a tiny model that knows nothing.

The model has the architecture of Qwen2-Audio, its tokenizer knows bytes. The voices of the validation recordings do
not occur in training.
"""

import argparse
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.demo.prepare_shapes import byte_tokenizer
from scripts.demo.speech import Speaker

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "Which digit is this?"
ACCENTS = ("en-gb", "en-us", "en-gb-scotland")
VOICES = {
    "training": (
        *("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "max", "linda"),
        *("adam", "belinda", "benjamin", "david", "ed", "edward", "grandpa", "iven", "michel"),
        *("miguel", "pablo", "paul", "rob", "robert", "shelby", "travis", "victor", "anika"),
        *("Alex", "Alicia", "Andrea", "Denis", "Gene", "Henrique", "Lee", "Mario", "Michael"),
    ),
    "validation": ("m8", "f5", "john", "zac", "steph", "Mike"),
}
MEL_BINS = 32
SPECIAL = (
    *("<|im_start|>", "<|im_end|>"),
    *("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
)
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def speak(speaker: Speaker, rng: np.random.Generator, digit: str, variants: tuple[str, ...]) -> Any:
    """A digit in a random voice, speed, pitch and loudness, with noise; 16-bit samples."""
    voice = f"{rng.choice(ACCENTS)}+{rng.choice(variants)}"
    speed = int(rng.integers(140, 200))
    sound = speaker.say(digit, voice, speed, int(rng.integers(30, 70)))
    silence = np.zeros(int(rng.integers(0, speaker.rate // 10)), np.float32)
    sound = np.concatenate((silence, rng.uniform(0.5, 1.0) * sound))[: speaker.rate]
    sound = sound + 0.002 * rng.standard_normal(len(sound))
    return (2**15 * np.clip(sound, -1, 1 - 2**-15)).astype(np.int16)


def write_recordings(folder: Path, split: str, count: int, speaker: Speaker, seed: int) -> None:
    """``count`` recordings and their records."""
    rng, lines = np.random.default_rng(seed), []
    (folder / split).mkdir(parents=True)
    for number in range(count):
        digit = DIGITS[number % len(DIGITS)]
        name = f"{split}/{number:04}.wav"
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, speaker.rate, 0, "NONE", ""))
            file.writeframes(speak(speaker, rng, digit, VOICES[split]).tobytes())
        question = [{"type": "audio", "audio": name}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": digit}
        lines.append(
            json.dumps({"messages": [{"role": "user", "content": question}, answer]}) + "\n"
        )
    (folder / f"{split}.jsonl").write_text("".join(lines))


def write_model(folder: Path) -> None:
    """Random weights, config, tokenizer and feature extractor in Hugging Face format, for recordings of a second."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    hf = byte_tokenizer(SPECIAL, TEMPLATE)
    text = {
        "model_type": "qwen2",
        "vocab_size": len(hf),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": hf.eos_token_id,
        "pad_token_id": hf.eos_token_id,
    }
    audio = {
        "num_mel_bins": MEL_BINS,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "max_source_positions": 50,
    }
    torch.manual_seed(0)
    token = hf.convert_tokens_to_ids("<|AUDIO|>")
    config = Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=token)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    hf.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1).save_pretrained(folder)


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("speech", type=Path, help="the unpacked package espeakng_loader")
    parser.add_argument("recordings", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--training", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=60)
    args = parser.parse_args()
    speaker = Speaker(args.speech)
    write_recordings(args.recordings, "training", args.training, speaker, seed=1)
    write_recordings(args.recordings, "validation", args.held_out, speaker, seed=2)
    write_model(args.model)


if __name__ == "__main__":
    main()
