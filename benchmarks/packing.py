# SPDX-License-Identifier: Apache-2.0
"""Tokenising conversations and packing them: throughput, fill, and the stall of a step.

``python -m benchmarks.packing --samples 2000`` compares, on the same made-up conversations and the same tokenizer,
this project's preparation with ``datasets.map`` over ``apply_chat_template``, and best-fit decreasing with filling
rows one after the other. Rounds are interleaved; CPU seconds stand beside wall seconds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 4,000 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text(seed, 400) for seed in range(200)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = PLAIN
    fast.save_pretrained(folder)


def text(seed: int, words: int) -> str:
    """Words of a made-up language whose frequencies fall off as those of a real one."""
    random = np.random.default_rng(seed)
    syllables = ["ka", "to", "mi", "ren", "sol", "va", "des", "un", "pre", "ing", "er", "tal"]
    ranks = np.minimum(random.zipf(1.3, words), 5000)
    return " ".join("".join(syllables[int(d) % 12] for d in np.base_repr(rank, 12)[:3].encode()) for rank in ranks)


def write_chats(path: Path, samples: int) -> int:
    """Conversations of one to three turns, lengths log-normal; the bytes written."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(samples):
            messages = []
            for turn in range(random.integers(1, 4)):
                for role, scale in (("user", 40), ("assistant", 120)):
                    words = int(np.clip(random.lognormal(np.log(scale), 0.8), 3, 1500))
                    messages.append({"role": role, "content": text(number * 7 + turn, words)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path.stat().st_size


def ours(path: Path, tokenizer: Any, template: str, workers: int) -> int:
    """Tokens and masks by this project."""
    from megatron.bridge.data.encoding import EncodingRules
    from megatron.bridge.data.prepare import Preparation, prepare
    from megatron.bridge.data.sources import FileSource

    rules = EncodingRules(max_tokens=4097, truncation="right", chat_template=template)
    return len(prepare(FileSource(path), tokenizer, rules, Preparation(workers=workers)).examples)


def by_map(path: Path, tokenizer: Any, workers: int) -> int:
    """Tokens and masks by ``datasets.map``, as transformers' own helper makes them, from a template with marks."""
    import datasets

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        out = tokenizer.hf.apply_chat_template(
            row["messages"], chat_template=CHATML, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": out["input_ids"], "mask": out["assistant_masks"]}

    loaded = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")
    )
    mapped = loaded.map(
        encode, num_proc=workers if workers > 1 else None, remove_columns=["messages"], load_from_cache_file=False
    )
    return len(mapped)


def one_after_the_other(lengths: np.ndarray, capacity: int) -> int:
    """Rows that are closed as soon as the next sample does not fit."""
    rows, space = 0, 0
    for length in lengths.tolist():
        if length > space:
            rows, space = rows + 1, capacity
        space -= length
    return rows


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def tokenising(folder: Path, samples: int, rounds: int, workers: int) -> None:
    from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

    make_tokenizer(folder / "tokenizer")
    tokenizer = HuggingFaceTokenizer(str(folder / "tokenizer"))
    path = folder / "chats.jsonl"
    size = write_chats(path, samples)
    ways: dict[str, Callable[[], int]] = {
        "ours, marked template": lambda: ours(path, tokenizer, CHATML, workers),
        "ours, prefixes rendered": lambda: ours(path, tokenizer, PLAIN, workers),
        "datasets.map, marked template": lambda: by_map(path, tokenizer, workers),
    }
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            best[name] = min(best.get(name, (np.inf, np.inf)), timed(way))
    print(f"tokenising {samples:,} conversations, {size / 1e6:.1f} MB, {workers} workers, best of {rounds}")
    for name, (wall, cpu) in best.items():
        rate = f"{size / 1e6 / wall:6.2f} MB/s {samples / wall:8.0f} samples/s"
        print(f"  {name:32} {rate}  (wall {wall:.2f} s, CPU of this process {cpu:.2f} s)")


def packing(samples: int, rounds: int) -> None:
    from megatron.bridge.data.packing import fill, pack

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.0, 0.9, samples).astype(int), 8, 4096)
    for capacity in (4096, 8192, 131072):
        rows = pack(lengths, capacity)
        wall = min(timed(lambda c=capacity: pack(lengths, c))[0] for _ in range(rounds))
        in_order = lengths.sum() / (one_after_the_other(lengths, capacity) * capacity)
        print(
            f"packing {samples:,} samples into rows of {capacity:,}: {fill(lengths, rows, capacity):.2%} full in "
            f"{wall:.3f} s; one after the other {in_order:.2%}"
        )


def loading(samples: int) -> None:
    """What a step waits for its batch, beside the first one."""
    from megatron.bridge.data.examples import Example, Examples
    from megatron.bridge.data.loaders import BatchIterator
    from megatron.bridge.data.rows import Epochs, PackedRows
    from megatron.bridge.data.samplers import MegatronPretrainingSampler

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.0, 0.9, samples).astype(int), 8, 4096)
    examples = Examples.of(Example(np.zeros(n, np.int32), np.arange(n) > n // 2) for n in lengths.tolist())
    rows = PackedRows(examples, 4096, padding=0)
    data = Epochs(rows, len(rows), seed=0)
    batches = BatchIterator(data, lambda: MegatronPretrainingSampler(len(data), 0, 1, 0, 1))
    waits = np.array([timed(lambda: next(batches))[0] for _ in range(min(len(rows), 500))])
    print(
        f"loading a packed row of 4,096: first {waits[0] * 1e3:.2f} ms, then {np.median(waits[1:]) * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--packed", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenising(Path(folder), args.samples, args.rounds, args.workers)
    packing(args.packed, args.rounds)
    loading(min(args.packed, 20_000))


if __name__ == "__main__":
    main()
