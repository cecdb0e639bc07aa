# SPDX-License-Identifier: Apache-2.0
"""Tokenise a large set once, be killed in the middle, go on, and find it made the next time.

python tutorials/data/03_resumable_preparation.py
"""

import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np

from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.finetuning import prepare_split
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent
OUT = Path("runs/tutorials/data/preparation")
COPIES = 192  # of 48 conversations: 9 parts of 1,024 records


def prepare(folder):
    """The tokenised samples, made or found: as ``megatron-bridge data prepare`` does, and else the run itself."""
    dataset = FinetuningDatasetConfig(dataset_root=str(OUT / "chats"), seq_length=128, prepared_dir=str(folder))
    return prepare_split(dataset, "train", HuggingFaceTokenizer(str(DATA / "tokenizer")))


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "chats").mkdir(parents=True)
    (OUT / "chats/training.jsonl").write_text((DATA / "chats/training.jsonl").read_text() * COPIES)

    # Each part is a file that appears whole or not at all. Kill the process (kill -9) when there are a few.
    process = multiprocessing.get_context("spawn").Process(target=prepare, args=(OUT / "prepared",))
    process.start()
    while len(made := list(OUT.glob("prepared/*.parts/*.npz"))) < 3 and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    print(f"killed: {len(made)} parts were there, and nothing that looks finished")
    assert not list(OUT.glob("prepared/*/bounds.npy"))

    # The same call again goes on behind them.
    before = {path: path.stat().st_mtime_ns for path in OUT.glob("prepared/*.parts/*.npz")}
    started = time.perf_counter()
    gone_on = prepare(OUT / "prepared")
    seconds = time.perf_counter() - started
    print(f"gone on behind {len(before)} parts: {len(gone_on.examples):,} samples, {seconds:.1f} s")

    # And once more finds the result, by a name that is made of the records, the tokenizer and all settings: change
    # one of them, and it is another name.
    started = time.perf_counter()
    prepare(OUT / "prepared")
    print(f"found: {time.perf_counter() - started:.1f} s")

    undisturbed = prepare(OUT / "undisturbed")
    assert np.array_equal(gone_on.examples.tokens, undisturbed.examples.tokens)
    assert np.array_equal(gone_on.examples.trained, undisturbed.examples.trained)
    print("it is what an undisturbed preparation makes, number for number")


if __name__ == "__main__":  # the child imports this file
    main()
