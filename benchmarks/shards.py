# SPDX-License-Identifier: Apache-2.0
"""Corpora in shards: speed beside Megatron-LM's tool and datatrove, memory, and the index of a huge corpus.

``python benchmarks/shards.py speed --megatron-lm CHECKOUT`` compares MB per CPU second of three programs on one core.
The difference between a small and a large input is measured: start-up does not count, and a busy machine matters
little. ``memory`` shows the peak of resident memory for growing inputs, ``index`` the time and memory of a rank
that builds the samples of a simulated corpus, and of one that reads them.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from measure import table
from preprocessing import make_corpus, make_tokenizer

ROOT = Path(__file__).parents[1]
BESIDE = ROOT / ".cache/shards"
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
folder, name, tokenizer, output = sys.argv[1:]
steps = [
    JsonlReader(folder, glob_pattern=name),
    MegatronDocumentTokenizer(output, tokenizer_name_or_path=tokenizer, eos_token="</s>"),
]
LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=f"{output}/logs").run()
"""


def commands(
    corpus: Path, tokenizer: Path, out: Path, megatron_lm: Path | None
) -> dict[str, list[str]]:
    """What tokenizes ``corpus`` on one core, by name."""
    ours = [
        sys.executable,
        "-m",
        "megatron.bridge.cli.main",
        "data",
        "preprocess",
        "--input",
        str(corpus),
    ]
    ours += [
        "--tokenizer-model",
        str(tokenizer),
        "--output-prefix",
        f"{out}/ours",
        "--append-eod",
        "--workers",
        "1",
    ]
    found = {"data preprocess --executor local": [*ours, "--executor", "local", "--shard-mb", "4"]}
    datatrove = [
        str(corpus.parent),
        corpus.name,
        str(tokenizer / "tokenizer.json"),
        f"{out}/datatrove",
    ]
    found["datatrove, MegatronDocumentTokenizer"] = [sys.executable, "-c", DATATROVE, *datatrove]
    if megatron_lm:
        tool = [
            sys.executable,
            str(megatron_lm / "tools/preprocess_data.py"),
            "--input",
            str(corpus),
            "--workers",
            "1",
        ]
        tool += [
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(tokenizer),
            "--append-eod",
        ]
        found["Megatron-LM, tools/preprocess_data.py"] = [
            *tool,
            "--output-prefix",
            f"{out}/megatron",
        ]
    return found


def cost(command: list[str], path: str) -> tuple[float, int]:
    """CPU seconds of a command with all its processes, and its peak of resident memory in bytes."""
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    code = (
        "import json, resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=environment, check=True, capture_output=True
    )
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def speed(args: argparse.Namespace, folder: Path) -> str:
    """MB per CPU second of each program, from the difference between two sizes; of the rounds, the least of each."""
    sizes = (args.megabytes // 5, args.megabytes)
    corpora = [folder / f"{size}.jsonl" for size in sizes]
    for corpus, size in zip(corpora, sizes, strict=True):
        make_corpus(corpus, size)
    make_tokenizer(corpora[0], folder / "tokenizer")
    path = os.pathsep.join([str(BESIDE), *([str(args.megatron_lm)] if args.megatron_lm else [])])
    used: dict[str, dict[Path, float]] = {}
    for number in range(args.rounds):
        for corpus in corpora:
            out = folder / f"{corpus.stem}-{number}"
            out.mkdir()
            for name, words in commands(
                corpus, folder / "tokenizer", out, args.megatron_lm
            ).items():
                least = used.setdefault(name, {})
                least[corpus] = min(cost(words, path)[0], least.get(corpus, float("inf")))
    difference = (corpora[1].stat().st_size - corpora[0].stat().st_size) / 1e6
    found = {
        name: difference / (least[corpora[1]] - least[corpora[0]]) for name, least in used.items()
    }
    ours = next(iter(found.values()))
    return table(
        ["", "MB per CPU second", "ours is"],
        [[n, f"{s:.2f}", f"{ours / s:.2f}x"] for n, s in found.items()],
    )


def memory(args: argparse.Namespace, folder: Path) -> str:
    """The peak of the largest process, for inputs of growing size."""
    rows = []
    for size in (args.megabytes // 16, args.megabytes // 4, args.megabytes):
        corpus = folder / f"{size}.jsonl"
        make_corpus(corpus, size)
        if not (folder / "tokenizer").exists():
            make_tokenizer(corpus, folder / "tokenizer")
        out = folder / f"out-{size}"
        words = next(iter(commands(corpus, folder / "tokenizer", out, None).values()))
        rows.append([f"{corpus.stat().st_size / 1e6:.0f}", f"{cost(words, '')[1] / 1e6:.0f}"])
    return table(["MB of input", "MB of memory at most"], rows)


def simulated(folder: Path, documents: int) -> np.ndarray:
    """Lengths as in web text, about 1,000 tokens in the mean, in a file."""
    path = folder / "lengths"
    chance = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, documents, 1 << 22):
            count = min(1 << 22, documents - start)
            file.write((chance.lognormal(6.4, 1.0, count).astype(np.int32) + 1).tobytes())
    return np.memmap(path, np.int32, "r")


def rank(folder: Path, documents: int, length: int) -> dict[str, float]:
    """Build or, if they are in the cache, read the sample indices of one epoch; seconds and bytes of this process."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    from megatron.bridge.data.pretraining.gpt_builder import CorpusDataset
    from megatron.bridge.data.tokenizer import NullTokenizer

    lengths = np.memmap(folder / "lengths", np.int32, "r")
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=length, split="1", path_to_cache=str(folder / "cache"), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, tokenizer=NullTokenizer(100),
    )  # fmt: skip
    corpus = SimpleNamespace(sequence_lengths=lengths, path_prefix="simulated")
    peak, kept, cpu = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        own_memory(),
        time.process_time(),
    )
    made = CorpusDataset(
        corpus,
        str(folder / "corpus"),
        np.arange(documents, dtype=np.int32),
        None,
        Split.train,
        config,
    )
    return {
        "cpu": time.process_time() - cpu,
        "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024.0,
        "kept": own_memory() - kept,
        "samples": len(made),
        "tokens": int(lengths.sum(dtype=np.int64)),
    }


def own_memory() -> float:
    """Resident bytes that no other process shares; memory maps of files are not among them."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024.0


def index(args: argparse.Namespace, folder: Path) -> str:
    """What joining shards and starting a rank cost, and 15 trillion tokens by the same rates."""
    from megatron.bridge.data.pretraining.indexed_writer import DocumentLengths, write_index

    simulated(folder, args.documents)
    peak, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    write_index(
        folder / "corpus.idx", "u4", [DocumentLengths(folder / "lengths", 0, args.documents)]
    )
    join = {
        "cpu": time.process_time() - cpu,
        "kept": 0.0,
        "disk": (folder / "corpus.idx").stat().st_size,
    }
    join["peak"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024.0
    words = [
        sys.executable,
        __file__,
        "rank",
        "--documents",
        str(args.documents),
        "--folder",
        str(folder),
    ]
    first, other = (
        json.loads(subprocess.run(words, check=True, capture_output=True).stdout.splitlines()[-1])
        for _ in range(2)
    )
    disk = sum(path.stat().st_size for path in (folder / "cache").iterdir())
    named = {
        "join the shards": join,
        "rank 0 builds": first | {"disk": disk},
        "another rank reads": other | {"disk": 0},
    }
    times = 15e12 / first["tokens"]
    corpora = -(-args.documents * times // (2**31 - 1))
    rows: list[list[str]] = []
    for name, at in named.items():
        # peaks are those of one corpus, as they follow one another
        scaled = (
            at["cpu"] * times / 3600,
            at["peak"] * times / corpora / 1e9,
            at["kept"] * times / 1e9,
        )
        rows.append(
            [
                name,
                f"{at['cpu']:.2f}",
                *(f"{at[key] / 1e6:,.0f}" for key in ("peak", "kept", "disk")),
            ]
        )
        rows[-1] += [
            f"{scaled[0]:.2f}",
            f"{scaled[1]:,.1f}",
            f"{scaled[2]:,.1f}",
            f"{at['disk'] * times / 1e9:,.0f}",
        ]
    heads = [
        "CPU s",
        "MB at most",
        "MB kept",
        "MB on disk",
        "CPU h",
        "GB at most",
        "GB kept",
        "GB on disk",
    ]
    title = f"{args.documents:,} documents with {first['tokens'] / 1e9:,.1f} billion tokens"
    return f"{title}; 15 trillion in {corpora:.0f} corpora\n{table(['', *heads], rows)}"


def main() -> None:
    """Measure one of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "memory", "index", "rank"))
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--megatron-lm", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "rank":
        print(json.dumps(rank(args.folder, args.documents, 4096)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print({"speed": speed, "memory": memory, "index": index}[args.what](args, Path(folder)))


if __name__ == "__main__":
    main()
