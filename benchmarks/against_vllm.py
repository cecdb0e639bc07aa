# SPDX-License-Identifier: Apache-2.0
"""Decoding by vLLM's CPU build or by this framework, on the same random weights and prompts.

vLLM needs an environment of its own, so that two processes take turns; each prints a line of JSON per batch::

    python -m benchmarks against_vllm make FOLDER --dtype bfloat16
    python -m benchmarks against_vllm here FOLDER --dtype bfloat16
    VLLM_ENV/bin/python -P benchmarks/against_vllm.py vllm FOLDER --dtype bfloat16  # -P: vLLM imports another "kernels"

One thread, CPU milliseconds. A step of decoding is the difference of two calls that differ by 24 tokens.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

STEPS, CALLS = 24, 4
VOCABULARY = 49152
Generate = Callable[[list[list[int]], int], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Decoding by vLLM's CPU build or by this framework."
    )
    parser.add_argument("engine", choices=("make", "here", "vllm"), help="make saves the model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if args.engine == "make":
        from benchmarks.inference import make_model

        make_model(args.folder, args.dtype)
        return
    generate = (here if args.engine == "here" else vllm)(args.folder, args.dtype)
    for batch in map(int, args.batches.split(",")):
        print(
            json.dumps(
                {"engine": args.engine, "batch": batch, **measured(generate, prompts(batch))}
            ),
            flush=True,
        )


def prompts(batch: int) -> list[list[int]]:
    """The prompts of benchmarks/inference.py, which vLLM's environment cannot import."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, VOCABULARY, (64 + 7 * i % 23,), generator=generator).tolist()
        for i in range(batch)
    ]


def here(folder: Path, dtype: str) -> Generate:
    import torch

    from megatron.bridge.inference.llm import LLM
    from megatron.bridge.inference.requests import Sampling

    torch.set_num_threads(1)
    llm = LLM(str(folder), dtype=dtype, max_context=2048, kv_memory=1 << 30)
    return lambda texts, count: llm.generate(texts, Sampling(max_new_tokens=count, ignore_eos=True))


def vllm(folder: Path, dtype: str) -> Generate:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    limits = {"max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
    llm = LLM(model=str(folder), dtype=dtype, skip_tokenizer_init=True, **limits)

    def generate(texts: list[list[int]], count: int) -> object:
        ends = {"max_tokens": count, "min_tokens": count, "ignore_eos": True, "detokenize": False}
        inputs = [{"prompt_token_ids": text} for text in texts]
        return llm.generate(inputs, SamplingParams(temperature=0, **ends), use_tqdm=False)

    return generate


def measured(generate: Generate, texts: list[list[int]]) -> dict[str, float]:
    """CPU milliseconds of a step, and tokens of a prompt in a CPU second."""
    seconds(generate, texts, 1 + STEPS)  # kernels are compiled
    prefill = statistics.median(seconds(generate, texts, 1) for _ in range(CALLS))
    whole = statistics.median(seconds(generate, texts, 1 + STEPS) for _ in range(CALLS))
    step = (whole - prefill) / STEPS * 1e3
    return {"decode_ms": round(step, 1), "prefill_tokens_s": round(sum(map(len, texts)) / prefill)}


def seconds(generate: Generate, texts: list[list[int]], count: int) -> float:
    start = time.process_time()
    generate(texts, count)
    return time.process_time() - start


if __name__ == "__main__":
    main()
