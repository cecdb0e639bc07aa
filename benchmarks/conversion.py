# SPDX-License-Identifier: Apache-2.0
"""Load and export of a random model against the cost of reading and writing the same bytes.

``python benchmarks/conversion.py`` makes the checkpoint in a temporary directory (about 2.2 GB for the default
size, 1.4 GB in 1,611 tensors for ``--size moe64``, 4.4 GB of a vision-language model for ``--size qwen2-vl-2b``) and
prints a Markdown table: seconds, the ratio to the floor of the same run, CPU seconds, and anonymous memory above the
model. ``torchrun --nproc-per-node 2 benchmarks/conversion.py --checkpoint DIR --tp 2`` (or ``--ep 2``) does the same
for each rank, and tells the share of the bytes that it reads. ``--planning CONFIG`` times the plan of a model
without weights.
"""

import argparse
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import Timing, fault_in, interleaved, median, table

SIZES = {
    "1b": {
        "model": "LlamaForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "135m": {
        "model": "LlamaForCausalLM",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model": "LlamaForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "moe64": {
        "model": "Qwen3MoeForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "moe_intermediate_size": 448,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "model": "Qwen3MoeForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
VISION = {"qwen2-vl-2b": "Qwen--Qwen2-VL-2B-Instruct.json"}  # in the recipes' configs
PARALLEL = ("tensor_model_parallel_size", "expert_model_parallel_size")


def make_checkpoint(size: str, directory: Path) -> None:
    """A random bfloat16 model, in shards of 500 MB as found on the hub."""
    import torch
    import transformers

    import megatron.bridge.recipes

    if size in VISION:
        config = json.loads(
            (Path(megatron.bridge.recipes.__path__[0]) / "configs" / VISION[size]).read_text()
        )
        config["model"] = config["architectures"][0]
    else:
        config = dict(SIZES[size])
    model = getattr(transformers, config.pop("model"))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model(model.config_class(**config)).save_pretrained(directory, max_shard_size="500MB")
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


def model_of_transformers(checkpoint: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    return getattr(transformers, config.architectures[0]).from_pretrained(checkpoint)


def load_with_transformers(checkpoint: Path) -> object:
    """The model of transformers, every page of its parameters read: it maps the files and returns at once."""
    model = model_of_transformers(checkpoint)
    for parameter in model.parameters():
        parameter.data.view(-1)[::2048].sum()
    return model


def benchmark(checkpoint: Path, scratch: Path, rounds: int) -> str:
    """Time load and export in turn with their floors and with transformers."""
    from megatron.bridge import AutoBridge

    size = weight_bytes(checkpoint)
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    reference = model_of_transformers(checkpoint)
    out, reference_out = scratch / "export", scratch / "reference"

    def load() -> object:
        return bridge.to_megatron_model(wrap_with_ddp=False)

    loads = interleaved(
        {
            "read the bytes (floor)": lambda: read_floor(checkpoint),
            "AutoBridge load": load,
            "transformers from_pretrained, read": lambda: load_with_transformers(checkpoint),
        },
        rounds,
        before_each=lambda: fault_in(3 * size),
    )
    model = load()
    exports = interleaved(
        {
            "write the bytes (floor)": lambda: write_floor(size, scratch / "floor"),
            "write and flush them, as an export does": lambda: write_floor(
                size, scratch / "floor", flush=True
            ),
            "AutoBridge export": lambda: bridge.save_hf_pretrained(
                model, str(out), show_progress=False
            ),
            "transformers save_pretrained": lambda: reference.save_pretrained(reference_out),
        },
        rounds,
        before_each=lambda: [
            shutil.rmtree(path, ignore_errors=True) for path in (out, reference_out)
        ],
    )
    rows = []
    for group, held in ((loads, size), (exports, 0)):
        floor = median(next(iter(group.values())))
        rows += [report(name, median(timings), floor, held) for name, timings in group.items()]
    return table(["step", "s", "x floor", "CPU s", "MB above the model"], rows)


def benchmark_ranks(checkpoint: Path, scratch: Path, rounds: int, layout: dict[str, int]) -> str:
    """The same on several ranks: each one's seconds and memory, and its share of the bytes."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.utils import distributed

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    size, out = weight_bytes(checkpoint), scratch / "export"
    provider = bridge.to_megatron_provider()
    for name, value in layout.items():
        setattr(provider, name, value)

    def load() -> list[object]:
        return provider.provide_distributed_model(wrap_with_ddp=False)

    def clear() -> None:
        distributed.barrier()
        if distributed.rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
        distributed.barrier()

    fault_in(3 * size // distributed.world_size())
    model = (
        load()
    )  # starts the process groups; and the clock of a rank must not wait for another's imports
    shares = bridge.hf_pretrained.state.bytes_read / size
    held = sum(parameter.nbytes for chunk in model for parameter in chunk.parameters())
    part = size // distributed.world_size()
    loads = {
        "read a share (floor)": lambda: read_share(
            checkpoint, distributed.rank(), distributed.world_size()
        ),
        "load": load,
    }
    exports = {
        "write a share (floor)": lambda: write_floor(part, scratch / f"floor{distributed.rank()}"),
        "export": lambda: bridge.save_hf_pretrained(model, str(out), show_progress=False),
    }
    rows = []
    for cases, above in ((loads, held), (exports, 0)):
        timings = {
            name: median(found)
            for name, found in interleaved(cases, rounds, before_each=clear).items()
        }
        floor = next(iter(timings.values()))
        rows += [report(name, timing, floor, above) for name, timing in timings.items()]
    clear()
    everyone = distributed.all_gather_object((rows, f"{shares:.2f}"))
    lines = [
        [str(rank), *row, share] for rank, (found, share) in enumerate(everyone) for row in found
    ]
    return table(
        ["rank", "step", "s", "x floor", "CPU s", "MB above the model", "share read"], lines
    )


def read_share(directory: Path, rank: int, ranks: int) -> list[bytes]:
    """Read every ``ranks``-th part of each weight file."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        part = path.stat().st_size // ranks
        with path.open("rb", buffering=0) as file:
            file.seek(rank * part)
            found.append(file.read(part))
    return found


def benchmark_planning(config: Path, rounds: int) -> str:
    """Time the plan of the model that a config.json describes, on the meta device."""
    from megatron.bridge import AutoBridge

    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(config, Path(folder) / "config.json")
        bridge = AutoBridge.from_hf_config(AutoBridge.from_hf_pretrained(folder).hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    model = provider.meta_model()
    cases = {"build on the meta device": provider.meta_model, "plan": lambda: bridge.plan(model)}
    timings = {name: median(found) for name, found in interleaved(cases, rounds).items()}
    plan = bridge.plan(model)
    what = f"{len(plan.tasks)} parameters, {len(plan.hf_names)} tensors"
    rows = [
        [name, f"{timing.wall:.2f}", f"{timing.cpu:.2f}", f"{timing.peak_anonymous / 2**20:.0f}"]
        for name, timing in timings.items()
    ]
    return table([what, "s", "CPU s", "MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=[*SIZES, *VISION], default="1b", help="shape of the random model"
    )
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint instead of making one")
    parser.add_argument("--make", type=Path, help="only make the checkpoint, here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size, under torchrun")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size, under torchrun")
    parser.add_argument(
        "--planning", type=Path, metavar="CONFIG", help="time the plan of this config.json"
    )
    args = parser.parse_args()
    if args.make:
        make_checkpoint(args.size, args.make)
        return
    if args.planning:
        print(benchmark_planning(args.planning, args.rounds))
        return
    layout = dict(zip(PARALLEL, (args.tp, args.ep), strict=True))
    if max(layout.values()) > 1 and not args.checkpoint:
        parser.error("--tp and --ep need --checkpoint, which --make makes")
    # on several ranks: beside the checkpoint, where all of them find it
    with tempfile.TemporaryDirectory() as own:
        scratch = Path(own)
        checkpoint = args.checkpoint or scratch / "model"
        if not args.checkpoint:
            make_checkpoint(args.size, checkpoint)
        if max(layout.values()) > 1:
            result = benchmark_ranks(checkpoint, checkpoint.parent, args.rounds, layout)
        else:
            result = benchmark(checkpoint, scratch, args.rounds)
    from megatron.bridge.utils import distributed

    if distributed.rank() == 0:
        print(result)


if __name__ == "__main__":
    main()
