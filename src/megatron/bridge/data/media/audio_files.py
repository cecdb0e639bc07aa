# SPDX-License-Identifier: Apache-2.0
"""Where a recording is, how long it is, and its waveform.

A record names a file by a path, holds its bytes, or holds samples with their rate. Lengths are read from the header of
the file, so records are tokenized and packed without decoding. Waveforms are those of transformers' ``load_audio``:
soundfile decodes, channels are averaged, and soxr resamples.
"""

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron.bridge.data.media.references import (
    AudioReference,
    open_file,
    shown,
    source_of,
    unreadable,
)
from megatron.bridge.utils.errors import UserError

FORMATS = "wav, flac, ogg, opus, mp3 or aiff"
"""The formats of files that are read."""
MAX_SECONDS = 4 * 3600
"""Longer recordings are refused: at 16 kHz, their waveform would take more than 900 MB."""
_READ = ("WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MPEG", "MP3", "AIFF", "AU", "CAF")
_EXTRA = "uv pip install 'hf-megatron-bridge[audio]'"


def refer_audio(raw: Any, root: Path, location: str) -> AudioReference:
    """The reference to a recording that a record names, once its length is read.

    Args:
        raw: a path, a ``data:`` URL, bytes, an object with one of them under ``audio``, ``path``, ``url`` or
            ``bytes``, or ``{"array": samples between -1 and 1, "sampling_rate": rate}``.
        root: the folder that relative paths start from; files outside of it are refused.
        location: names the record in messages.
    """
    if isinstance(raw, Mapping) and raw.get("array") is not None:
        raw = _encode_samples(raw["array"], raw.get("sampling_rate"), location)
    elif isinstance(raw, Mapping) and raw.get("sampling_rate") is not None:
        raise UserError(
            f"{location}: the audio has sampling_rate={raw['sampling_rate']}, and a file has its own: remove it"
        )
    source = source_of(raw, root, location, "audio")
    with _opened(source, location) as file:
        audio = AudioReference(source, file.frames, file.samplerate, file.channels, location)
    if not audio.frames:
        raise UserError(f"{location}: the audio {shown(source)} is empty: remove the record")
    if audio.seconds > MAX_SECONDS:
        raise UserError(
            f"{location}: the audio {shown(source)} has {audio.seconds:,.0f} seconds, more than {MAX_SECONDS:,}: "
            "split it"
        )
    return audio


def resampled_length(audio: AudioReference, rate: int) -> int:
    """Number of samples of the waveform at ``rate``."""
    return math.ceil(audio.frames * rate / audio.rate)


def decode_audio(audio: AudioReference, rate: int) -> np.ndarray:
    """The waveform [samples] of one channel at ``rate`` samples per second, float32."""
    with _opened(audio.source, audio.where) as file:
        channels = file.read(audio.frames + 1, dtype="float32", always_2d=True).T
    if channels.shape != (audio.channels, audio.frames):
        raise UserError(
            f"{audio.where}: the audio {shown(audio.source)} has {channels.shape[1]:,} samples, and its header said "
            f"{audio.frames:,}: restore or repair it, or remove the record"
        )
    waveform = channels.mean(axis=0) if audio.channels > 1 else channels[0]
    if not np.isfinite(waveform).all():
        raise UserError(
            f"{audio.where}: the audio {shown(audio.source)} has samples that are not finite: repair it, or remove "
            "the record"
        )
    return _resample(waveform, audio, rate)


def wav_file(waveform: np.ndarray, rate: int, subtype: str = "PCM_16") -> bytes:
    """A wav file with one channel; ``subtype`` is soundfile's name of the numbers in it."""
    soundfile = _import_soundfile("a recording")
    buffer = io.BytesIO()
    soundfile.write(buffer, waveform, rate, format="WAV", subtype=subtype)
    return buffer.getvalue()


def _resample(waveform: np.ndarray, audio: AudioReference, rate: int) -> np.ndarray:
    if audio.rate == rate:
        return np.ascontiguousarray(waveform)
    try:
        import soxr  # pyright: ignore[reportMissingImports] - of an extra
    except ImportError as error:
        raise UserError(
            f"{audio.where}: the audio {shown(audio.source)} has {audio.rate:,} samples per second, the model takes "
            f"{rate:,}, and soxr, which resamples it, is not installed: {_EXTRA}"
        ) from error
    length = resampled_length(audio, rate)
    resampled = soxr.resample(waveform, audio.rate, rate, quality="HQ")[:length]
    padded = np.pad(resampled, (0, length - len(resampled)))
    return np.ascontiguousarray(padded, dtype=np.float32)


def _encode_samples(samples: Any, rate: Any, location: str) -> bytes:
    """A wav file with the exact samples."""
    if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
        raise UserError(
            f"{location}: audio that is an array has sampling_rate={rate!r}: say how many samples there are per second"
        )
    try:
        waveform = np.asarray(samples)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{location}: the array of the audio is {type(samples).__name__}, not a list of numbers: write the "
            "samples of one channel"
        ) from error
    if waveform.ndim != 1 or not np.issubdtype(waveform.dtype, np.floating):
        raise UserError(
            f"{location}: the array of the audio has the shape {list(waveform.shape)} and the type {waveform.dtype}: "
            "give the samples of one channel as floats between -1 and 1"
        )
    _import_soundfile(location)
    return wav_file(waveform.astype(np.float32), rate, "FLOAT")


@contextmanager
def _opened(source: str, location: str) -> Iterator[Any]:
    """Open a recording with soundfile, and convert errors to one sentence, also those while it is read."""
    soundfile = _import_soundfile(location)
    try:
        with open_file(source, location) as file, soundfile.SoundFile(file) as audio:
            if audio.format not in _READ:
                raise ValueError(f"{audio.format} is not {FORMATS}")
            yield audio
    except soundfile.LibsndfileError as error:
        known = ValueError(f"{error.error_string.rstrip('.')}; give {FORMATS}")
        raise unreadable("audio", source, location, known) from error
    except (OSError, ValueError, RuntimeError, TypeError, MemoryError) as error:
        raise unreadable("audio", source, location, error) from error


def _import_soundfile(location: str) -> Any:
    try:
        import soundfile  # pyright: ignore[reportMissingImports] - of an extra
    except (ImportError, OSError) as error:  # the latter without its library
        raise UserError(
            f"{location}: audio is read by soundfile, which is not installed: {_EXTRA}"
        ) from error
    return soundfile
