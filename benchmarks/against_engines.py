# SPDX-License-Identifier: Apache-2.0
"""Decoding by vLLM's CPU build, by llama.cpp or by this framework, on random weights of one shape.

The others need environments of their own (vLLM: ``scripts/vllm.sh``; llama.cpp: ``pip install llama-cpp-python gguf``),
so processes take turns; each prints a line of JSON per batch::

    python -m benchmarks against_engines make FOLDER --dtype bfloat16
    python -m benchmarks against_engines here FOLDER --dtype bfloat16
    .cache/vllm/bin/python -P benchmarks/against_engines.py vllm FOLDER --dtype bfloat16
    LLAMA_ENV/bin/python -P benchmarks/against_engines.py llama.cpp FOLDER --dtype float16 --batches 1

(``-P``, because vLLM imports another module ``kernels``.) One thread, CPU milliseconds. A step of decoding is the
difference of two calls that differ by 24 tokens. llama.cpp has float16 instead of bfloat16, and one text.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

STEPS, CALLS = 24, 4
VOCABULARY = 49152
Generate = Callable[[list[list[int]], int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding by another engine or by this framework.")
    parser.add_argument(
        "engine", choices=("make", "here", "vllm", "llama.cpp"), help="make saves the model"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if args.engine == "make":
        from benchmarks.inference import make_model

        make_model(args.folder, args.dtype)
        return
    engines = {"here": here, "vllm": vllm, "llama.cpp": llama_cpp}
    generate = engines[args.engine](args.folder, args.dtype)
    for batch in map(int, args.batches.split(",")):
        print(
            json.dumps(
                {"engine": args.engine, "batch": batch, **measured(generate, prompts(batch))}
            ),
            flush=True,
        )


def prompts(batch: int) -> list[list[int]]:
    """Random token ids of 64 to 86 tokens, as in benchmarks/inference.py, which other environments cannot import."""
    generator = random.Random(0)
    return [[generator.randrange(VOCABULARY) for _ in range(64 + 7 * i % 23)] for i in range(batch)]


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


def llama_cpp(folder: Path, dtype: str) -> Generate:
    import llama_cpp as package  # pyright: ignore[reportMissingImports]

    path = folder / f"{dtype}.gguf"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        write_gguf(path, dtype)
    llm = package.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)

    def generate(texts: list[list[int]], count: int) -> None:
        (text,) = texts
        llm.reset()
        llm.eval(text)
        for token in range(count - 1):
            llm.eval([token])

    return generate


def write_gguf(path: Path, dtype: str) -> None:
    """Write random weights of SmolLM2-135M's shape."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np

    width, inner, layers, heads, groups = 576, 1536, 30, 9, 3
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    generator = np.random.default_rng(0)

    def add_matrix(name: str, rows: int, columns: int) -> None:
        values = generator.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(f"{name}.weight", values.astype(dtype))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))

    add_matrix("token_embd", VOCABULARY, width)
    for layer in range(layers):
        block = f"blk.{layer}"
        add_norm(f"{block}.attn_norm")
        add_norm(f"{block}.ffn_norm")
        add_matrix(f"{block}.attn_q", width, width)
        add_matrix(f"{block}.attn_k", groups * width // heads, width)
        add_matrix(f"{block}.attn_v", groups * width // heads, width)
        add_matrix(f"{block}.attn_output", width, width)
        add_matrix(f"{block}.ffn_gate", inner, width)
        add_matrix(f"{block}.ffn_up", inner, width)
        add_matrix(f"{block}.ffn_down", width, inner)
    add_norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
