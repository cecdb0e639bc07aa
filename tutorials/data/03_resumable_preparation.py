# SPDX-License-Identifier: Apache-2.0
"""Tokenize a large dataset once, get killed in the middle, resume, and reuse the result.

python tutorials/data/03_resumable_preparation.py
"""

import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np

from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent
OUT = Path("runs/tutorials/data/preparation")
COPIES = 192  # of 48 conversations: 9 parts of 1,024 records


def prepare(folder):
    """The tokenized samples, made or reused, as in ``megatron-bridge data prepare`` and in a run."""
    dataset = FinetuningDatasetConfig(
        dataset_root=str(OUT / "chats"), seq_length=128, prepared_dir=str(folder)
    )
    return prepare_split(dataset, "train", HuggingFaceTokenizer(str(DATA / "tokenizer")))


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "chats").mkdir(parents=True)
    (OUT / "chats/training.jsonl").write_text((DATA / "chats/training.jsonl").read_text() * COPIES)

    # Each part is a file that appears as a whole or not at all. Kill the process (kill -9) when there are a few.
    process = multiprocessing.get_context("spawn").Process(target=prepare, args=(OUT / "prepared",))
    process.start()
    while len(made := list(OUT.glob("prepared/*.parts/*.npz"))) < 3 and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    print(f"killed: {len(made)} parts exist, and nothing looks finished")
    assert not list(OUT.glob("prepared/*/bounds.npy"))

    # The same call resumes after them.
    before = {path: path.stat().st_mtime_ns for path in OUT.glob("prepared/*.parts/*.npz")}
    started = time.perf_counter()
    resumed = prepare(OUT / "prepared")
    seconds = time.perf_counter() - started
    print(f"resumed after {len(before)} parts: {len(resumed.samples):,} samples, {seconds:.1f} s")

    # The next call finds the result by its name, a hash of the records, the tokenizer and all settings: change one
    # of them, and the name changes.
    started = time.perf_counter()
    prepare(OUT / "prepared")
    print(f"found: {time.perf_counter() - started:.1f} s")

    undisturbed = prepare(OUT / "undisturbed")
    assert np.array_equal(resumed.samples.tokens, undisturbed.samples.tokens)
    assert np.array_equal(resumed.samples.trained, undisturbed.samples.trained)
    print("equal to an uninterrupted preparation, number for number")


if __name__ == "__main__":  # the child imports this file
    main()
