# SPDX-License-Identifier: Apache-2.0
"""Tokenizing conversations and packing them: throughput, fill, start-up, and the stall of a step.

``python -m benchmarks.packing --samples 2000`` compares, on the same made-up conversations and the same tokenizer,
this project's preparation with ``datasets.map`` over ``apply_chat_template``, and best-fit decreasing with filling
rows one after the other and, with ``--trl DIR``, with TRL's packing. Rounds are interleaved; CPU seconds stand
beside wall seconds.
"""

import argparse
import json
import sys
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
    return " ".join(
        "".join(syllables[int(d) % 12] for d in np.base_repr(rank, 12)[:3].encode())
        for rank in ranks
    )


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
    from megatron.bridge.data.records.preparation import prepare
    from megatron.bridge.data.records.record_config import EncodingRules
    from megatron.bridge.data.records.sources import FileSource

    rules = EncodingRules(max_tokens=4097, truncation="right", chat_template=template)
    return len(prepare(FileSource(path), tokenizer, rules, workers=workers).samples)


def by_map(path: Path, tokenizer: Any, workers: int) -> int:
    """Tokens and masks by ``datasets.map``, as transformers' own helper makes them, from a template with marks."""
    import datasets

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        out = tokenizer.hf.apply_chat_template(
            row["messages"],
            chat_template=CHATML,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return {"input_ids": out["input_ids"], "mask": out["assistant_masks"]}

    loaded = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")
    )
    mapped = loaded.map(
        encode,
        num_proc=workers if workers > 1 else None,
        remove_columns=["messages"],
        load_from_cache_file=False,
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
    print(
        f"tokenising {samples:,} conversations, {size / 1e6:.1f} MB, {workers} workers, best of {rounds}"
    )
    for name, (wall, cpu) in best.items():
        rate = f"{size / 1e6 / wall:6.2f} MB/s {samples / wall:8.0f} samples/s"
        print(f"  {name:32} {rate}  (wall {wall:.2f} s, CPU of this process {cpu:.2f} s)")


def lengths_of(samples: int) -> np.ndarray:
    """Log-normal, as those of instructions are."""
    random = np.random.default_rng(0)
    return np.clip(random.lognormal(6.0, 0.9, samples).astype(int), 8, 4096)


def samples_of(lengths: np.ndarray) -> Any:
    """Samples of these lengths; the second half of each is in the loss."""
    from megatron.bridge.data.records.samples import Sample, Samples

    return Samples.of(
        Sample(np.zeros(n + 1, np.int32), np.arange(n + 1) > n // 2) for n in lengths.tolist()
    )


def packing(samples: int, rounds: int) -> None:
    from megatron.bridge.data.finetuning.packing import pack

    lengths = lengths_of(samples)
    for capacity in (4096, 8192, 131072):
        rows = pack(lengths, capacity)
        wall = min(timed(lambda c=capacity: pack(lengths, c))[0] for _ in range(rounds))
        in_order = lengths.sum() / (one_after_the_other(lengths, capacity) * capacity)
        fill = lengths.sum() / (len(rows) * capacity)
        print(
            f"packing {samples:,} samples into rows of {capacity:,}: {fill:.2%} full in "
            f"{wall:.3f} s; one after the other {in_order:.2%}"
        )


def against_trl(folder: Path, samples: int, rounds: int) -> None:
    """Rows of tokens from samples of tokens: TRL writes them to a table, ours are made when they are drawn.

    Hence ours is timed twice: the plan alone, and with every row made once.
    """
    sys.path.append(str(folder))  # behind everything else: only TRL itself is taken from there
    import datasets
    import trl
    from trl.data_utils import pack_dataset

    from megatron.bridge.data.finetuning.rows import PackedRows

    lengths, capacity = lengths_of(samples), 4096
    examples = samples_of(lengths)
    table = datasets.Dataset.from_dict(
        {"input_ids": [np.zeros(n, np.int32) for n in lengths.tolist()]}
    )
    datasets.disable_caching()
    datasets.disable_progress_bars()

    def by_trl(**options: Any) -> int:
        return len(pack_dataset(table, capacity, "bfd", {"load_from_cache_file": False, **options}))

    def ours_made() -> int:
        rows = PackedRows(examples, capacity, padding=0)
        return sum(len(row["cu_seqlens"]) > 1 for row in map(rows.__getitem__, range(len(rows))))

    ways: dict[str, Callable[[], int]] = {
        "ours, the plan": lambda: len(PackedRows(examples, capacity, padding=0)),
        "ours, every row made": ours_made,
        f"TRL {trl.__version__}, as it is called by default": by_trl,
        f"TRL {trl.__version__}, all samples at once": lambda: by_trl(batch_size=samples),
    }
    best = dict.fromkeys(ways, np.inf)
    for _ in range(rounds):
        for name, way in ways.items():
            best[name] = min(best[name], timed(way)[0])
    print(
        f"packing {samples:,} samples of {lengths.sum():,} tokens into rows of {capacity:,}, best of {rounds}"
    )
    for name, wall in best.items():
        full = lengths.sum() / (ways[name]() * capacity)
        rate = f"{samples / wall:10,.0f} samples/s {lengths.sum() * 4 / 1e6 / wall:8.1f} MB/s"
        print(f"  {name:42} {rate}  {full:.2%} full")


def starting(folder: Path, samples: int) -> None:
    """What a run waits for its first batch: tokenising in memory, into a folder, and from that folder."""
    from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
    from megatron.bridge.data.loaders import build_iterators
    from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(str(folder / "tokenizer"))
    data = folder / "run"
    data.mkdir()
    write_chats(data / "training.jsonl", samples)

    def first_batch(prepared: Path | None) -> None:
        config = FinetuningDatasetConfig(
            seq_length=4096,
            dataset_root=str(data),
            truncation="right",
            packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=4096),
            prepared_dir=None if prepared is None else str(prepared),
        )
        train = build_iterators(config, tokenizer, (8, 0, 0), 1, 8).train
        assert train is not None
        next(train)

    print(f"first batch of a run on {samples:,} conversations")
    for name, prepared in (
        ("tokenised in memory", None),
        ("prepared now", data / "p"),
        ("prepared", data / "p"),
    ):
        print(f"  {name:20} {timed(lambda where=prepared: first_batch(where))[0]:7.2f} s")


def step(seconds: float) -> None:
    """A step's work: products of matrices, as the training thread has them."""
    import torch

    a, end = torch.ones(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = (a @ a).clamp(max=1)


def loading(samples: int, seconds: float, steps: int) -> None:
    """What a step waits for its batch."""
    from megatron.bridge.data.finetuning.rows import EpochRows, PackedRows
    from megatron.bridge.data.loaders import BatchIterator
    from megatron.bridge.data.samplers import MegatronPretrainingSampler

    rows = PackedRows(samples_of(lengths_of(samples)), 4096, padding=0)
    data = EpochRows(rows, len(rows), seed=0)
    ways = {"in the step": (0, False), "a thread ahead": (0, True), "a process ahead": (1, True)}
    print(f"a packed row of 4,096 for steps of {seconds * 1e3:.0f} ms")
    for name, (workers, ahead) in ways.items():
        batches = BatchIterator(
            data, lambda: MegatronPretrainingSampler(len(data), 0, 1, 0, 1), workers, ahead
        )
        waits = []
        for _ in range(min(len(rows), steps)):
            start = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - start)
            step(seconds)
            del batch  # a step also frees it here
        print(
            f"  {name:16} first {waits[0] * 1e3:7.2f} ms, then {np.median(waits[1:]) * 1e3:.3f} ms, "
            f"99 of 100 below {np.quantile(waits[1:], 0.99) * 1e3:.3f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--packed", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step, for the stall")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--trl",
        type=Path,
        metavar="DIR",
        help="where `pip install --no-deps --target DIR trl` put it",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenising(Path(folder), args.samples, args.rounds, args.workers)
        starting(Path(folder), args.samples)
    if args.trl is not None:
        against_trl(args.trl, args.packed, args.rounds)
    packing(args.packed, args.rounds)
    loading(min(args.packed, 20_000), args.step, args.steps)


if __name__ == "__main__":
    main()
