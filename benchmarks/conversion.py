# SPDX-License-Identifier: Apache-2.0
"""Load and export of a random Llama against the cost of reading and writing the same bytes.

``python benchmarks/conversion.py`` makes the checkpoint (about 2.2 GB for the default size) in a temporary
directory and prints a Markdown table: seconds, the ratio to the floor of the same run, CPU seconds, and anonymous
memory above the model. ``torchrun --nproc-per-node 2 benchmarks/conversion.py --checkpoint DIR --tp 2`` reports
the bytes that each rank reads.
"""

import argparse
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measure import Timing, fault_in, interleaved, median, table, timed

SIZES = {
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def make_checkpoint(size: str, directory: Path) -> None:
    """A random bfloat16 Llama, in shards of 500 MB as found on the hub."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**SIZES[size])).save_pretrained(directory, max_shard_size="500MB")
    torch.set_default_dtype(torch.float32)


def weight_bytes(directory: Path) -> int:
    """Bytes of all weight files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def read_floor(directory: Path) -> list[bytearray]:
    """Read the weight files with two threads into fresh memory: what no loader can beat by much."""

    def read(path: Path) -> bytearray:
        buffer = bytearray(path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            position = 0
            while count := file.readinto(memoryview(buffer)[position:]):
                position += count
        return buffer

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(read, sorted(directory.glob("*.safetensors"))))


def write_floor(size: int, path: Path, flush: bool = False) -> None:
    """Write ``size`` bytes from memory with one thread; with ``flush``, until the disk has them."""
    block = memoryview(bytearray(64 << 20))
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: min(len(block), size - start)])
        if flush:
            os.fsync(file.fileno())
    path.unlink()


def report(name: str, timing: Timing, floor: Timing, model_bytes: int) -> list[str]:
    """One row of the table."""
    above = max(timing.peak_anonymous - model_bytes, 0) if model_bytes else timing.peak_anonymous
    return [
        name,
        f"{timing.wall:.2f}",
        f"{timing.wall / floor.wall:.2f}",
        f"{timing.cpu:.2f}",
        f"{above / 2**20:.0f}",
    ]


def benchmark(checkpoint: Path, scratch: Path, rounds: int) -> str:
    """Time load and export in turn with their floors and with transformers."""
    from transformers import AutoModelForCausalLM

    from megatron.bridge import AutoBridge

    size = weight_bytes(checkpoint)
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    out, reference_out = scratch / "export", scratch / "reference"

    def load() -> object:
        return bridge.to_megatron_model(wrap_with_ddp=False)

    loads = interleaved(
        {
            "read the bytes (floor)": lambda: read_floor(checkpoint),
            "AutoBridge load": load,
            "transformers from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(checkpoint),
        },
        rounds,
        before_each=lambda: fault_in(3 * size),
    )
    model = load()
    exports = interleaved(
        {
            "write the bytes (floor)": lambda: write_floor(size, scratch / "floor"),
            "write and flush them, as an export does": lambda: write_floor(size, scratch / "floor", flush=True),
            "AutoBridge export": lambda: bridge.save_hf_pretrained(model, str(out), show_progress=False),
            "transformers save_pretrained": lambda: reference.save_pretrained(reference_out),
        },
        rounds,
        before_each=lambda: [shutil.rmtree(path, ignore_errors=True) for path in (out, reference_out)],
    )
    rows = []
    for group, held in ((loads, size), (exports, 0)):
        floor = median(next(iter(group.values())))
        rows += [report(name, median(timings), floor, held) for name, timings in group.items()]
    return table(["step", "s", "x floor", "CPU s", "MB above the model"], rows)


def count_reads(checkpoint: Path, tensor_parallel: int) -> str:
    """Load under tensor parallelism and say what share of the bytes each rank read."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.utils import dist

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = tensor_parallel
    timing = timed(lambda: provider.provide_distributed_model(wrap_with_ddp=False))
    # through memory maps, which the process's own counters do not see
    share = bridge.hf_pretrained.state.bytes_read / weight_bytes(checkpoint)
    shares = dist.all_gather_object((share, timing.wall))
    return table(
        ["rank", "share of the bytes read", "s"],
        [[str(rank), f"{share:.2f}", f"{wall:.2f}"] for rank, (share, wall) in enumerate(shares)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b", help="shape of the random model")
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint instead of making one")
    parser.add_argument("--make", type=Path, help="only make the checkpoint, here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="under torchrun: count the bytes that each rank reads")
    args = parser.parse_args()
    if args.make:
        make_checkpoint(args.size, args.make)
        return
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or Path(scratch) / "model"
        if not args.checkpoint:
            make_checkpoint(args.size, checkpoint)
        result = (
            count_reads(checkpoint, args.tp) if args.tp > 1 else benchmark(checkpoint, Path(scratch), args.rounds)
        )
    from megatron.bridge.utils import dist

    if dist.rank() == 0:
        print(result)


if __name__ == "__main__":
    main()
