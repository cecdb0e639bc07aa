# SPDX-License-Identifier: Apache-2.0
"""Tokenising a corpus against the tokenizer alone.

``python benchmarks/preprocessing.py`` makes a JSONL corpus of Python's own sources and trains a byte-level BPE on
a part of it (or takes ``--input`` and ``--tokenizer-model``). The reference is one call of ``encode_batch_fast``
on all texts with all cores, without reading, parsing or writing anything. CPU seconds include worker processes.
"""

import argparse
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import table

from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from megatron.bridge.data.tokenizer import load_hf_tokenizer

VOCABULARY, DOCUMENT = 16_000, 4_000


def make_corpus(path: Path, megabytes: int) -> None:
    """Python's sources in documents of about 4 kB."""
    left = megabytes * 1_000_000
    with path.open("w") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            text = source.read_text(errors="ignore")
            for start in range(0, len(text), DOCUMENT):
                left -= file.write(json.dumps({"text": text[start : start + DOCUMENT]}) + "\n")
            if left <= 0:
                return


def make_tokenizer(corpus: Path, directory: Path) -> None:
    """A byte-level BPE trained on the first 2,000 documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts_of(corpus)[:2000], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)


def texts_of(corpus: Path) -> list[str]:
    """All documents."""
    with corpus.open() as file:
        return [json.loads(line)["text"] for line in file]


def cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(function: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    function()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def main() -> None:
    """Measure in interleaved rounds and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path)
    parser.add_argument("--tokenizer-model", type=Path)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        corpus = args.input or Path(directory) / "corpus.jsonl"
        if args.input is None:
            make_corpus(corpus, args.megabytes)
        model = args.tokenizer_model or Path(directory) / "tokenizer"
        if args.tokenizer_model is None:
            make_tokenizer(corpus, model)
        print(
            table(
                ["", "MB/s", "CPU s", "speed", "speed per CPU second"],
                rows(corpus, model, args.rounds),
            )
        )


def rows(corpus: Path, model: Path, rounds: int) -> list[list[str]]:
    """One row per candidate, the reference first."""
    config = PreprocessConfig(
        inputs=[corpus],
        output_prefix=corpus.parent / "benchmark_output",
        tokenizer_model=str(model),
        append_eod=True,
        overwrite=True,
    )
    texts, backend = texts_of(corpus), load_hf_tokenizer(str(model)).backend_tokenizer  # type: ignore[attr-defined]
    times: dict[str, list[tuple[float, float]]] = {"encode_batch_fast": [], "data preprocess": []}
    for _ in range(rounds):
        encode = measured(
            lambda: [
                found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)
            ]
        )
        times["encode_batch_fast"].append(encode)
        seconds: list[float] = []
        _, cpu = measured(lambda: seconds.append(preprocess(config).seconds))  # noqa: B023 - called at once
        times["data preprocess"].append((seconds[0], cpu))
    size = corpus.stat().st_size / 1e6
    wall = {name: statistics.median(each[0] for each in found) for name, found in times.items()}
    cpu_of = {name: statistics.median(each[1] for each in found) for name, found in times.items()}
    first = next(iter(times))
    return [
        [
            name,
            f"{size / wall[name]:.1f}",
            f"{cpu_of[name]:.1f}",
            f"{wall[first] / wall[name]:.2f}",
            f"{cpu_of[first] / cpu_of[name]:.2f}",
        ]
        for name in times
    ]


if __name__ == "__main__":
    main()
