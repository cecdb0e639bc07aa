# SPDX-License-Identifier: Apache-2.0
"""Quantize a Hugging Face model with a library that calibrates on the user's texts, and measure what that cost.

The library is llm-compressor, in a process of its own. Its files are read back by this project's reader, so what is
measured is what was written.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from megatron.bridge.models.conversion.engine import side_files
from megatron.bridge.models.hf_pretrained import quantization_configs
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import (
    QuantizedCheckpoint,
    write_in_full,
)
from megatron.bridge.models.surgery import llm_compressor_script
from megatron.bridge.utils.errors import UserError, did_you_mean

Method = Literal["gptq", "awq", "observe"]
METHODS: dict[Method, str] = {
    "gptq": "moves the errors of each weight into those that come after it",
    "awq": "scales up the channels with large activations before rounding",
    "observe": "rounds to nearest, and observes activations for the schemes that store their scales",
}
"""How weights are rounded, with a line for ``--help``."""

WEIGHTS_ONLY = ("W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "MXFP4A16")
WITH_ACTIVATIONS = ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4", "MXFP8")
SCHEMES = (*WEIGHTS_ONLY, *WITH_ACTIVATIONS)
"""compressed-tensors' names; vLLM reads all of them."""

_INSTALL = (
    "pip install llmcompressor` in an environment of its own, because it needs another version of transformers, and "
    "name its interpreter with --python"
)
_LAST_LINES = 3
_CHUNK = 4096  # bytes
_KEPT_CHUNKS = 64


@dataclass(frozen=True)
class CalibrationPlan:
    """How to quantize.

    Args:
        method: one of ``METHODS``.
        scheme: one of ``SCHEMES``.
        keep_high: patterns of Hugging Face names of tensors that stay in full, besides embeddings and output layer.
        python: the interpreter that has llm-compressor.
    """

    method: Method
    scheme: str
    keep_high: tuple[str, ...]
    python: str


@dataclass(frozen=True)
class CalibrationReport:
    """What was written, and what it costs.

    Attributes:
        quantized: Tensors that are stored quantized.
        in_full: Matrices that are not, besides embeddings and output layer.
        losses: Mean loss of a token in held-out texts, by model: ``in full`` and ``calibrated``, where weights are
            rounded and activations are not.
        held_out_tokens: Tokens that were predicted.
    """

    quantized: int
    in_full: tuple[str, ...]
    losses: dict[str, float]
    held_out_tokens: int


def calibrate(
    source: PreTrainedCausalLM,
    folder: Path,
    plan: CalibrationPlan,
    calibration: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    overwrite: bool = False,
) -> CalibrationReport:
    """Write a quantized model with the tokenizer and other files of its source.

    Args:
        source: The model in full.
        folder: The folder to create.
        plan: How to quantize.
        calibration: Token ids of the texts to calibrate on.
        held_out: Token ids of other texts, on which the loss is measured.
        overwrite: Replace the weights of an earlier call in ``folder``.

    Raises:
        UserError: The library is missing or fails, a pattern matches nothing, or the loss of what was written is not
            a number.
    """
    _refuse_quantized(source)
    in_full = ["lm_head", *_modules_in_full(source, plan.keep_high)]
    with side_files.published(folder, overwrite) as staging:
        _run_library(source, staging, plan, in_full, calibration)
        for name in source.side_files():
            if not (staging / name).exists():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.directory / name, staging / name)
        (staging / "recipe.yaml").unlink(missing_ok=True)  # what the library was told, again
        return _report(source, PreTrainedCausalLM(staging), held_out)


def _refuse_quantized(source: PreTrainedCausalLM) -> None:
    if source.quantization is not None:
        raise UserError(
            f"{source.directory} is quantized already ({source.quantization['quant_method']}): give the model in full, "
            "which `megatron-bridge export` writes"
        )


def _modules_in_full(source: PreTrainedCausalLM, patterns: Sequence[str]) -> list[str]:
    """Return the modules whose tensors match some of ``patterns``."""
    names = list(source.state)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or ": leave it out"
            raise UserError(f"--keep-high {pattern!r} matches no tensor{hint}")
    return [
        name.removesuffix(".weight")
        for name in names
        if any(fnmatch(name, pattern) for pattern in patterns)
    ]


def _run_library(
    source: PreTrainedCausalLM,
    output: Path,
    plan: CalibrationPlan,
    in_full: Sequence[str],
    token_ids: Sequence[Sequence[int]],
) -> None:
    """Let llm-compressor write its model into ``output``."""
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "model": str(source.directory.resolve()),
            "output": str(output.resolve()),
            "method": plan.method,
            "scheme": plan.scheme,
            "in_full": list(in_full),
            "token_ids": [list(row) for row in token_ids],
        }
        job_file = Path(scratch, "job.json")
        job_file.write_text(json.dumps(job))
        # -P: the folder of the script is not where it looks for modules
        command = [plan.python, "-P", llm_compressor_script.__file__, str(job_file)]
        try:
            code, printed = _run_and_show(command, Path(scratch))
        except OSError as error:
            raise UserError(
                f"--python {plan.python} cannot be started ({error.strerror}): run `{_INSTALL}"
            ) from None
    if code == 0:
        return
    if "No module named 'llmcompressor'" in printed:
        raise UserError(f"llm-compressor is not installed for {plan.python}: run `{_INSTALL}")
    lines = [line for line in printed.splitlines() if line.strip()]
    raise UserError(
        f"llm-compressor failed with --method {plan.method} --scheme {plan.scheme}: "
        + " | ".join(lines[-_LAST_LINES:])
    )


def _run_and_show(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Return the exit code and the end of the output; a terminal shows all of it, progress bars included."""
    is_shown = sys.stderr.isatty()
    last_chunks: deque[bytes] = deque(maxlen=_KEPT_CHUNKS)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        output = cast(BufferedReader, process.stdout)
        while chunk := output.read1(_CHUNK):
            last_chunks.append(chunk)
            if is_shown:
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
    return process.returncode, b"".join(last_chunks).decode(errors="replace")


def _report(
    source: PreTrainedCausalLM, written: PreTrainedCausalLM, held_out: Sequence[Sequence[int]]
) -> CalibrationReport:
    quantized = written.state
    if not isinstance(quantized, QuantizedCheckpoint):
        raise UserError(
            f"llm-compressor quantized nothing of {source.directory}: it knows no linear layer of this architecture"
        )
    losses = {"in full": held_out_loss(source.directory, held_out)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_in_full(quantized, folder)
        config = json.loads((written.directory / "config.json").read_text())
        config.pop(quantization_configs.KEY, None)
        (folder / "config.json").write_text(json.dumps(config))
        losses["calibrated"] = held_out_loss(folder, held_out)
    if not math.isfinite(losses["calibrated"]):
        raise UserError(
            "the loss of the quantized model is not a number: use another --method, or keep more layers in full with "
            "--keep-high"
        )
    return CalibrationReport(
        quantized=len(quantized.packed),
        in_full=_matrices_in_full(written.state.entries, quantized.packed),
        losses=losses,
        held_out_tokens=sum(len(row) - 1 for row in held_out),
    )


def _matrices_in_full(entries: Mapping[str, Any], quantized: Mapping[str, Any]) -> tuple[str, ...]:
    ends = ("embed_tokens.weight", "lm_head.weight")
    return tuple(
        name
        for name, entry in entries.items()
        if len(entry.shape) > 1 and name not in quantized and not name.endswith(ends)
    )


@torch.no_grad()
def held_out_loss(folder: Path, rows: Sequence[Sequence[int]]) -> float:
    """Return the mean cross-entropy of a token after the first, of transformers' model in ``folder``.

    Args:
        folder: Model in full.
        rows: Token ids of texts.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    device = torch.cuda.current_device()
    model = loaded.eval().to(device)
    total = 0.0
    count = 0
    for row in rows:
        ids = torch.tensor([row], device=device)
        logits = model(ids).logits.float()
        total += float(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += len(row) - 1
    return total / count
