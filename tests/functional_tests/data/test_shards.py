# SPDX-License-Identifier: Apache-2.0
"""2,000 shards, made by processes of which 20 are killed, hold the bytes that one process writes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from megatron.bridge.data.pretraining.shards import finished_manifest
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture

SHARDS, KILLS = 2000, 20
CODE = """
import sys
from pathlib import Path
from megatron.bridge.data.pretraining.preprocess import PreprocessConfig
from megatron.bridge.data.pretraining.shards import preprocess_shards
source, prefix, tokenizer, size = sys.argv[1:]
config = PreprocessConfig(inputs=[source], output_prefix=Path(prefix), tokenizer_model=tokenizer, workers=2)
preprocess_shards(config, "local", int(size), {})
"""


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def done(prefix):
    return len(list(Path(f"{prefix}.shards").glob("0*.source.json")))


@pytest.mark.slow
def test_2000_shards_with_20_kills_are_the_bytes_of_one_process(tokenizer_dir, tmp_path):  # noqa: F811
    source = tmp_path / "corpus.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"{at}: {TEXT[at % 4]}"}) + "\n" for at in range(3 * SHARDS))
    )
    config = PreprocessConfig(
        inputs=[source],
        output_prefix=tmp_path / "one",
        tokenizer_model=str(tokenizer_dir),
        workers=1,
    )
    preprocess(config)
    size = -(-source.stat().st_size // SHARDS)
    prefix = tmp_path / "many"
    words = [sys.executable, "-c", CODE, *map(str, (source, prefix, tokenizer_dir, size))]
    chance, killed = random.Random(0), 0
    while finished_manifest(prefix) is None:
        process = subprocess.Popen(words)
        target = done(prefix) + chance.randrange(1, SHARDS // KILLS)
        while process.poll() is None and killed < KILLS:
            if done(prefix) < target or not (workers := children(process.pid)):
                time.sleep(0.01)
                continue
            whole = chance.random() < 0.5  # the process that waits for the workers, or one of them
            os.kill(process.pid if whole else chance.choice(workers), signal.SIGKILL)
            killed += 1
            target = done(prefix) + chance.randrange(1, SHARDS // KILLS)
            if whole:
                break
        assert process.wait() in (0, -signal.SIGKILL)
    assert killed == KILLS
    assert done(prefix) == SHARDS
    files = sorted(Path(f"{prefix}.shards").glob("0*.bin"))
    assert b"".join(path.read_bytes() for path in files) == (tmp_path / "one.bin").read_bytes()
    assert Path(f"{prefix}.idx").read_bytes() == (tmp_path / "one.idx").read_bytes()
    assert {path.suffix for path in Path(f"{prefix}.shards").iterdir()} == {".bin", ".idx", ".json"}
