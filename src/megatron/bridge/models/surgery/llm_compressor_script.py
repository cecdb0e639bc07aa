# SPDX-License-Identifier: Apache-2.0
"""Quantize a Hugging Face model with llm-compressor. A script, run by the Python that has llm-compressor.

It imports nothing of Megatron Bridge, because llm-compressor needs a version of transformers of its own.
usage: python llm_compressor_script.py JOB.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(job_file: str) -> None:
    """Quantize as the file says: see ``calibration._write_job``."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot  # pyright: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = json.loads(Path(job_file).read_text())
    if not torch.cuda.is_available():
        _pin_nothing()
    rows = job["token_ids"]
    masks = [[1] * len(row) for row in rows]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(job["model"]),
        dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": masks}),
        recipe=[_modifier(job)],
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, rows)),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(job["output"], save_compressed=True)


def _modifier(job: dict[str, Any]) -> Any:
    from llmcompressor.modifiers.awq import AWQModifier  # pyright: ignore
    from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore
    from llmcompressor.modifiers.quantization import QuantizationModifier  # pyright: ignore

    kinds = {"awq": AWQModifier, "gptq": GPTQModifier, "observe": QuantizationModifier}
    return kinds[job["method"]](targets="Linear", scheme=job["scheme"], ignore=job["in_full"])


def _pin_nothing() -> None:
    """llm-compressor 0.14 pins host memory for copies to a GPU, which fails without one."""
    from llmcompressor.pipelines.cache import IntermediatesCache  # pyright: ignore

    def keep(cache: Any, *_: Any, **__: Any) -> None:
        del cache

    IntermediatesCache.pin_memory = keep


if __name__ == "__main__":
    main(sys.argv[1])
