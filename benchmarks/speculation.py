# SPDX-License-Identifier: Apache-2.0
"""Decoding with drafts, for drafts that are right with a given probability.

``python -m benchmarks.speculation --dtype bfloat16 --batches 1,8`` measures SmolLM2-135M's shape with random weights in
one process with one thread, in interleaved rounds and CPU seconds. The drafts of a text are its own next tokens, of
which each is replaced by another one with the rest of the probability. ``off`` has no drafts.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.inference import SHAPES, generate_ours, make_model, prompts
from benchmarks.measure import interleaved, median, table

RATES = (0.0, 0.5, 0.8, 1.0)


class PlantedDrafter:
    """Proposes the known next tokens of texts, each of which is right with probability ``rate``."""

    def __init__(self, texts: list[list[int]], rate: float) -> None:
        self._texts = texts
        self._rate = rate
        self._draw = random.Random(0)

    def propose(self, text: Any, most: int) -> list[int]:
        count = len(text.tokens)
        known = next(tokens for tokens in self._texts if tokens[:count] == text.tokens)
        drafts = known[count : count + most]
        return [
            token if self._draw.random() < self._rate else (token + 1) % 100 for token in drafts
        ]

    def forget(self, text: Any) -> None:
        pass


def measure(llm: Any, texts: list[list[int]], steps: int, rounds: int) -> list[list[str]]:
    """One row for each rate: accepted drafts, and CPU milliseconds of a token of each text."""
    engine = llm.engine
    engine._drafter = None
    completions = generate_ours(llm, texts, 1 + steps)
    known = [one.prompt_tokens + one.tokens for (one,) in completions]
    drafters: dict[str, Any] = {"off": None}
    drafters |= {f"{rate:.0%}": PlantedDrafter(known, rate) for rate in RATES}
    accepted: dict[str, float] = {}

    def generate(name: str, count: int) -> None:
        engine._drafter = drafters[name]
        before = engine.drafted_tokens, engine.accepted_tokens
        generate_ours(llm, texts, count)
        drafted = engine.drafted_tokens - before[0]
        if drafted:
            accepted[name] = (engine.accepted_tokens - before[1]) / drafted

    cases: dict[str, Any] = {}
    for name in drafters:
        cases[f"{name} 1"] = lambda name=name: generate(name, 1)
        cases[f"{name} all"] = lambda name=name: generate(name, 1 + steps)
        cases[f"{name} all"]()  # records steps
    seconds = {name: median(timings).cpu for name, timings in interleaved(cases, rounds).items()}
    cost = {
        name: 1000 * (seconds[f"{name} all"] - seconds[f"{name} 1"]) / steps for name in drafters
    }
    return [
        [
            str(len(texts)),
            name,
            f"{accepted[name]:.0%}" if name in accepted else "",
            f"{cost[name]:.1f}",
            f"{cost['off'] / cost[name]:.2f}",
        ]
        for name in drafters
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from megatron.bridge.inference.llm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), args.dtype, shape=args.shape)
        speculative = {"method": "ngram", "num_speculative_tokens": args.tokens}
        with LLM(folder, dtype=args.dtype, kv_memory=1 << 30, speculative=speculative) as llm:
            rows = []
            for batch in map(int, args.batches.split(",")):
                texts = prompts(batch, model.config.vocab_size)
                rows += measure(llm, texts, args.steps, args.rounds)
                print(rows[-len(RATES) - 1 :], file=sys.stderr, flush=True)
    headers = ["batch", "right drafts", "accepted", "ms/token of each text", "faster"]
    print(f"{args.shape}, {args.dtype}, {args.tokens} drafts\n\n{table(headers, rows)}")


if __name__ == "__main__":
    main()
