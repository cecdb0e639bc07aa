# SPDX-License-Identifier: Apache-2.0
"""``export_hf_weights``, and the comparison of ``megatron-bridge verify``, against copying the same bytes.

``python benchmarks/streaming.py`` makes a random 1.1B Llama (``--size moe64``: 64 experts) and streams it; each
tensor is dropped as it comes. ``torchrun --nproc-per-node 2 benchmarks/streaming.py --checkpoint DIR --tp 2`` (or
``--ep 2``, ``--pp 2``; ``conversion.py --make DIR`` makes the checkpoint) does so on every rank: each gets every
tensor. Prints a Markdown table: seconds, GB/s of whole tensors, the ratio to the floor, CPU seconds, and
anonymous memory above the model. On one rank there are also the hashes: of a certificate (SHA-256 of each tensor,
and both sides compared) and of a Megatron checkpoint's files (XXH3-128).
"""

import argparse
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conversion import SIZES, make_checkpoint, weight_bytes
from measure import Timing, fault_in, interleaved, median, table

BLOCK = 64 << 20
LAYOUT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def copy_memory(size: int) -> None:
    """Copy ``size`` bytes from one block into another: what no stream can beat."""
    source, target = np.ones(BLOCK, dtype=np.uint8), np.empty(BLOCK, dtype=np.uint8)
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        target[:count] = source[:count]


def sha256(size: int) -> None:
    """Hash ``size`` bytes of memory as a certificate does."""
    block = np.ones(BLOCK, dtype=np.uint8)
    for start in range(0, size, BLOCK):
        hashlib.sha256(memoryview(block)[: min(BLOCK, size - start)]).hexdigest()


def hash_files(directory: Path) -> None:
    """Hash files as the manifest of a Megatron checkpoint does."""
    from megatron.bridge.checkpoint import manifest

    for path in directory.glob("*.safetensors"):
        manifest.hash_file(path)


def load(checkpoint: Path, layout: dict[str, int]) -> tuple[Any, Any]:
    """Bridge and model."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider()
    for name, value in layout.items():
        setattr(provider, LAYOUT[name], value)
    return bridge, provider.provide_distributed_model(wrap_with_ddp=False)


def cases(
    checkpoint: Path, bridge: Any, model: Any, buckets: list[int]
) -> dict[str, Callable[[], object]]:
    """What is timed; of one rank also the proofs, whose bytes are in the page cache after the first round."""
    from megatron.bridge.models.conversion.check.certificate import prove
    from megatron.bridge.utils import distributed

    size = weight_bytes(checkpoint)

    def stream(bucket: int) -> None:
        for _ in bridge.export_hf_weights(model, show_progress=False, bucket_bytes=bucket << 20):
            pass

    found: dict[str, Callable[[], object]] = {
        "copy the bytes in memory (floor)": lambda: copy_memory(size)
    }
    for bucket in buckets:
        found[f"export_hf_weights, buckets of {bucket} MB"] = lambda bucket=bucket: stream(bucket)
    if distributed.world_size() == 1:
        state = bridge.hf_pretrained.state
        found["SHA-256 of the bytes"] = lambda: sha256(size)
        found["verify: stream, compare, SHA-256"] = lambda: prove(
            bridge.export_hf_weights(model, show_progress=False), state
        )
        found["XXH3-128 of the files"] = lambda: hash_files(checkpoint)
    return found


def report(timings: dict[str, Timing], size: int, rank: int) -> list[list[str]]:
    """The rows of one rank."""
    floor = next(iter(timings.values()))
    return [
        [
            str(rank),
            name,
            f"{timing.wall:.2f}",
            f"{size / timing.wall / 1e9:.2f}",
            f"{timing.wall / floor.wall:.1f}",
            f"{timing.cpu:.2f}",
            f"{timing.peak_anonymous / 2**20:.0f}",
        ]
        for name, timing in timings.items()
    ]


def benchmark(checkpoint: Path, layout: dict[str, int], buckets: list[int], rounds: int) -> str:
    """All ranks in turn with their floors."""
    from megatron.bridge.utils import distributed

    size = weight_bytes(checkpoint)
    bridge, model = load(checkpoint, layout)
    fault_in(2 * (max(buckets) << 20))
    found = interleaved(
        cases(checkpoint, bridge, model, buckets), rounds, before_each=distributed.barrier
    )
    rows = report(
        {name: median(timings) for name, timings in found.items()}, size, distributed.rank()
    )
    everyone = distributed.all_gather_object(rows)
    headers = [
        "rank",
        f"step, {size / 1e9:.2f} GB",
        "s",
        "GB/s",
        "x floor",
        "CPU s",
        "MB above the model",
    ]
    return table(headers, [row for rank in everyone for row in rank])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1b", help="shape of the random model")
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint instead of making one")
    parser.add_argument(
        "--buckets", type=int, nargs="+", default=[64, 512], metavar="MB", help="sizes of buckets"
    )
    parser.add_argument("--rounds", type=int, default=3)
    for name, field in LAYOUT.items():
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{field}, under torchrun")
    args = parser.parse_args()
    layout = {name: getattr(args, name) for name in LAYOUT}
    if max(layout.values()) > 1 and not args.checkpoint:
        parser.error("several ranks need --checkpoint, which conversion.py --make makes")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or Path(scratch) / "model"
        if not args.checkpoint:
            make_checkpoint(args.size, checkpoint)
        result = benchmark(checkpoint, layout, args.buckets, args.rounds)
    from megatron.bridge.utils import distributed

    if distributed.rank() == 0:
        print(result)


if __name__ == "__main__":
    main()
