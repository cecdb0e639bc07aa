# SPDX-License-Identifier: Apache-2.0
"""Prefill and decoding against transformers' ``generate``, on the same random weights and prompts.

``python -m benchmarks.inference --dtype bfloat16 --batches 1,8`` measures SmolLM2-135M's shape in one process with
one thread, in interleaved rounds and CPU seconds. On a GPU it measures wall-clock seconds; give ``--shape llama32-1b``
there. A step of decoding is the difference of two calls that differ by ``--steps`` tokens. The share of the scheduler
is measured on the plans of the last batch.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import DEVICE, interleaved, median, table

PUBLISHED = Path("tests/families/published")
_SMOL, _TOY = (
    PUBLISHED / "HuggingFaceTB--SmolLM2-135M.json",
    {"num_hidden_layers": 1, "vocab_size": 512},
)
SHAPES: dict[str, tuple[Path, dict[str, int]]] = {
    "smollm2-135m": (_SMOL, {}),
    "toy": (_SMOL, _TOY),
    "llama32-1b": (PUBLISHED / "meta-llama--Llama-3.2-1B.json", {}),
}


def make_model(folder: Path, dtype: str, tied: bool = True, shape: str = "smollm2-135m") -> Any:
    """A model of transformers with random weights, saved in ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path, changes = SHAPES[shape]
    config = AutoConfig.for_model(
        **json.loads(path.read_text()) | changes | {"tie_word_embeddings": tied}
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    return model


def prompts(batch: int, vocabulary: int) -> list[list[int]]:
    """Token ids of 64 to 86 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, vocabulary, (64 + 7 * i % 23,), generator=generator).tolist()
        for i in range(batch)
    ]


def generate_hf(model: Any, texts: list[list[int]], count: int) -> Any:
    """Greedy tokens of transformers for left-padded prompts."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=DEVICE)
    mask = torch.tensor(
        [[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=DEVICE
    )
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        ).cpu()


def generate_ours(llm: Any, texts: list[list[int]], count: int) -> Any:
    from megatron.bridge.inference.requests import Sampling

    return llm.generate(texts, Sampling(max_new_tokens=count, ignore_eos=True))


class Row(NamedTuple):
    """What was found for a batch: tokens/s of prefill, milliseconds of a step of decoding."""

    batch: int
    prefill_hf: float
    prefill_ours: float
    decode_hf: float
    decode_ours: float

    def cells(self) -> list[str]:
        faster = (
            f"{self.prefill_ours / self.prefill_hf:.2f}",
            f"{self.decode_hf / self.decode_ours:.2f}",
        )
        prefill = [f"{self.prefill_hf:.0f}", f"{self.prefill_ours:.0f}", faster[0]]
        return [
            str(self.batch),
            *prefill,
            f"{self.decode_hf:.1f}",
            f"{self.decode_ours:.1f}",
            faster[1],
        ]


def measure(model: Any, llm: Any, texts: list[list[int]], steps: int, rounds: int) -> Row:
    """One row of the table."""
    cases: dict[str, Any] = {}
    for name, function, one in (("hf", generate_hf, model), ("ours", generate_ours, llm)):
        cases[f"{name} 1"] = lambda function=function, one=one: function(one, texts, 1)
        cases[f"{name} all"] = lambda function=function, one=one: function(one, texts, 1 + steps)
        cases[f"{name} all"]()  # compiles kernels and captures graphs
    clock = "wall" if DEVICE == "cuda" else "cpu"
    found = {
        name: getattr(median(timings), clock)
        for name, timings in interleaved(cases, rounds).items()
    }
    tokens = sum(map(len, texts))
    prefill = {name: tokens / found[f"{name} 1"] for name in ("hf", "ours")}
    decode = {
        name: 1000 * (found[f"{name} all"] - found[f"{name} 1"]) / steps for name in ("hf", "ours")
    }
    return Row(len(texts), prefill["hf"], prefill["ours"], decode["hf"], decode["ours"])


def scheduler_share(llm: Any, texts: list[list[int]], steps: int) -> float:
    """The part of decoding that is spent in the scheduler."""
    spent, lane = [0.0], llm.engine.lanes[0]
    plain = {name: getattr(lane, name) for name in ("plan", "commit")}

    def timed(name: str) -> Any:
        def call(*args: Any) -> Any:
            start = time.process_time()
            try:
                return plain[name](*args)
            finally:
                spent[0] += time.process_time() - start

        return call

    for name in plain:
        setattr(lane, name, timed(name))
    start = time.process_time()
    generate_ours(llm, texts, steps)
    total = time.process_time() - start
    for name in plain:
        delattr(lane, name)
    return spent[0] / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from megatron.bridge.inference.llm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), args.dtype, shape=args.shape)
        with LLM(
            folder, dtype=args.dtype, kv_memory=1 << 30, max_requests=64, graphs=args.graphs
        ) as llm:
            rows, texts = [], []
            for batch in map(int, args.batches.split(",")):
                texts = prompts(batch, model.config.vocab_size)
                rows.append(measure(model, llm, texts, args.steps, args.rounds).cells())
                print(f"batch {batch}: {', '.join(rows[-1][1:])}", file=sys.stderr, flush=True)
            share = scheduler_share(llm, texts, args.steps)
    headers = ["batch", "prefill hf tok/s", "ours", "ratio", "decode hf ms/step", "ours", "ratio"]
    print(f"{args.shape}, {args.dtype}, {DEVICE}, one thread\n\n{table(headers, rows)}\n")
    print(f"scheduler: {share:.1%} of a step")


if __name__ == "__main__":
    main()
