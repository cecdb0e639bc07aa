# SPDX-License-Identifier: Apache-2.0
"""Memory of generation beside weights and caches: ``python -m benchmarks.inference_memory --dtype bfloat16``.

A model of ``--shape`` with random weights answers ``--batch`` prompts; the caches are as small as these texts
need, so that all of their pages are touched. Anonymous memory of the process is compared before the model is loaded,
and while it generates; pages of mapped files, which the kernel drops when memory is short, do not count. A toy has
generated before, so modules and compiled kernels do not count either. The floor is the bytes of all weights and of the
caches.
"""

import argparse
import json
import multiprocessing
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks.inference import SHAPES, make_model, prompts


def own_bytes() -> int:
    """Bytes of anonymous memory, which is not backed by files."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return 1024 * int(line.split()[1])


class Highest:
    """The most memory that the process has inside the context."""

    def __enter__(self) -> "Highest":
        self.bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, own_bytes())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    """Print the floor and what was used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as toy:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # it leaves no memory here
            pool.apply(make_model_only, (Path(folder), args.dtype, not args.untied, args.shape))
            pool.apply(make_model_only, (Path(toy), args.dtype, True, "toy"))
        warm_up(toy)
        measure(Path(folder), args)


def make_model_only(*options: Any) -> None:
    make_model(*options)


def warm_up(folder: str) -> None:
    from megatron.bridge.inference.llm import LLM
    from megatron.bridge.inference.requests import Sampling

    with LLM(folder, max_requests=8, kv_memory=1 << 22) as llm:
        llm.generate(prompts(8, 512), Sampling(max_new_tokens=4, ignore_eos=True))


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Load the model, generate, and print."""
    from megatron.bridge.inference.decoding_state import Kept
    from megatron.bridge.inference.llm import LLM
    from megatron.bridge.inference.requests import Sampling

    texts, shape = prompts(args.batch, 512), json.loads(SHAPES[args.shape][0].read_text())
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    each = (
        2 * heads * 64 * getattr(torch, args.dtype).itemsize
    )  # keys and values of heads with 64 features
    arena = each * sum(-(-(len(text) + args.tokens) // 16) * 16 for text in texts)
    before = own_bytes()
    with Highest() as loading:
        llm = LLM(str(folder), max_requests=args.batch, kv_memory=arena)
    assert each == sum(it.per_token for it in Kept.of(llm._chunks))
    with Highest() as highest:
        llm.generate(texts, Sampling(max_new_tokens=args.tokens, ignore_eos=True))
    llm.close()
    floor = weights + arena
    first, second = ((one.bytes - before) / 1e6 for one in (loading, highest))
    print(
        f"{args.dtype}, {args.batch} texts: weights {weights / 1e6:,.0f} MB + caches {arena / 1e6:,.0f} MB = "
        f"{floor / 1e6:,.0f} MB; at most {first:,.0f} MB while loading, {second:,.0f} MB while generating "
        f"({second * 1e6 / floor - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
