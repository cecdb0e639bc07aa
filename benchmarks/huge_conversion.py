# SPDX-License-Identifier: Apache-2.0
"""Conversion of a checkpoint that is larger than memory, both ways, against reading and writing the same bytes.

``python benchmarks/huge_conversion.py --parameters 30`` makes a dense bfloat16 model of about 30 billion
numbers in safetensors files that are holes (they take no room on the disk and read as zeros). It runs
``megatron-bridge convert`` on it and, with ``--export``, ``megatron-bridge export``, each in a process of its
own, and prints a Markdown table: seconds, the ratio to the floor, and the peak of the process's memory: all of
it (VmHWM, with the pages of mapped files, which the system takes back when it needs them) and the anonymous
part. The output needs room for all bytes, 60 GB for 30 billion numbers, twice with ``--export``: free space is
checked first.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure import table

SHARD = 5 * 10**9
WIDTH, INNER, VOCABULARY, LAYER_SHARE = 6144, 16384, 64000, 8
BLOCK = 64 << 20


@dataclass(frozen=True)
class Run:
    """One process: its wall seconds, and its peaks of memory in bytes."""

    wall: float
    peak: int = 0
    anonymous: int = 0


def config(parameters: float) -> dict[str, object]:
    """A Llama of about so many billion parameters, as deep as is needed."""
    scale = min(1.0, (parameters / 8) ** 0.5)
    width = max(256, int(WIDTH * scale) // 256 * 256)
    inner = width * INNER // WIDTH // 64 * 64
    layer = width * width * (2 + 2 / LAYER_SHARE) + 3 * width * inner
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": max(1, round((parameters * 1e9 - 2 * VOCABULARY * width) / layer)),
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64 // LAYER_SHARE,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def shapes(model: dict[str, object]) -> dict[str, list[int]]:
    """The tensors of such a model."""
    width, inner, words = (
        int(str(model[key])) for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    narrow = width // LAYER_SHARE
    found = {"model.embed_tokens.weight": [words, width]}
    for index in range(int(str(model["num_hidden_layers"]))):
        layer = {
            "input_layernorm": [width],
            "self_attn.q_proj": [width, width],
            "self_attn.k_proj": [narrow, width],
            "self_attn.v_proj": [narrow, width],
            "self_attn.o_proj": [width, width],
            "post_attention_layernorm": [width],
            "mlp.gate_proj": [inner, width],
            "mlp.up_proj": [inner, width],
            "mlp.down_proj": [width, inner],
        }
        found |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": [width], "lm_head.weight": [words, width]}


def make_checkpoint(parameters: float, directory: Path) -> int:
    """Write the sparse model; its bytes."""
    directory.mkdir()
    model = config(parameters)
    (directory / "config.json").write_text(json.dumps(model, indent=2))
    files: list[dict[str, list[int]]] = [{}]
    held = total = 0
    for name, shape in shapes(model).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if held + size > SHARD:
            files.append({})
            held = 0
        files[-1][name] = shape
        held, total = held + size, total + size
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_sparse(directory / file, tensors)
        index |= dict.fromkeys(tensors, file)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def write_sparse(path: Path, tensors: dict[str, list[int]]) -> None:
    """A safetensors file with a header, and a hole for the numbers."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def copied(files: list[Path], target: Path) -> Run:
    """Read files and write and flush what was read, with one buffer: what no conversion can beat by much."""
    start = time.perf_counter()
    buffer = memoryview(bytearray(BLOCK))
    with target.open("wb", buffering=0) as out:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    out.write(buffer[:count])
        os.fsync(out.fileno())
    wall = time.perf_counter() - start
    target.unlink()
    return Run(wall)


def measured(*words: str | Path) -> Run:
    """Run ``megatron-bridge`` and watch its memory."""
    start, peak, anonymous = time.perf_counter(), 0, 0
    command = [sys.executable, "-m", "megatron.bridge.cli.main", *map(str, words), "--no-progress"]
    process = subprocess.Popen(command)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        found = {
            line.split(":")[0]: line.split()[1]
            for line in status.splitlines()
            if line.startswith(("Vm", "Rss"))
        }
        peak = max(peak, int(found.get("VmHWM", 0)) * 1024)
        anonymous = max(anonymous, int(found.get("RssAnon", 0)) * 1024)
        time.sleep(0.01)
    if process.wait():
        raise SystemExit(f"{' '.join(map(str, words))} failed")
    return Run(time.perf_counter() - start, peak, anonymous)


def kilobytes(status: str, key: str) -> int:
    """A number of ``/proc/PID/status``; 0 of a process that has ended."""
    return next(
        (int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{key}:")), 0
    )


def row(name: str, run: Run, floor: Run, size: int) -> list[str]:
    """One line of the table."""
    memory = [f"{value / 2**20:,.0f}" if value else "" for value in (run.peak, run.anonymous)]
    return [
        name,
        f"{run.wall:.1f}",
        f"{size / run.wall / 1e9:.2f}",
        f"{run.wall / floor.wall:.2f}",
        *memory,
    ]


def benchmark(parameters: float, folder: Path, export: bool) -> str:
    """Convert, and export, in ``folder``."""
    source, megatron, back = folder / "hf", folder / "megatron", folder / "exported"
    size = make_checkpoint(parameters, source)
    free = shutil.disk_usage(folder).free
    needed = int(size * (2 if export else 1) * 1.02)
    if needed > free:
        raise SystemExit(
            f"{folder} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed"
        )
    files = sorted(source.glob("*.safetensors"))
    floor = copied(files, folder / "floor")
    rows = [row("read the source, write and flush it (floor)", floor, floor, size)]
    rows.append(
        row(
            "convert",
            measured("convert", "--hf-model", source, "--megatron-path", megatron),
            floor,
            size,
        )
    )
    if export:
        stored = sorted(megatron.rglob("*.distcp"))
        floor = copied(stored, folder / "floor")
        rows.append(row("read the checkpoint, write and flush it (floor)", floor, floor, size))
        words = ("export", "--hf-model", source, "--megatron-path", megatron, "--hf-path", back)
        rows.append(row("export", measured(*words), floor, size))
    what = f"{size / 2e9:.2f} billion parameters, {size / 1e9:.1f} GB"
    return table([what, "s", "GB/s", "x floor", "peak MB", "anonymous MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1.0, help="billions (default 1)")
    parser.add_argument("--export", action="store_true", help="and back to Hugging Face format")
    parser.add_argument(
        "--folder", type=Path, help="where to work (default: the system's temporary folder)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(benchmark(args.parameters, Path(folder), args.export))


if __name__ == "__main__":
    main()
