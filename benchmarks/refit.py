# SPDX-License-Identifier: Apache-2.0
"""Refit against a plain copy of the same bytes, in one process, interleaved.

``python -m benchmarks.refit`` trains nothing: it sends the random weights of SmolLM2-135M's shape to a model of
transformers and to an engine of this project, all of them and only what changed, and copies them once into memory
that other processes can see and once out of it, which is the floor of any channel with a buffer. An engine on the
trainer's own chunks shares its parameters.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.inference import make_model
from benchmarks.measure import interleaved, median, table


def floor(weights: dict[str, torch.Tensor], buckets: Any) -> Any:
    """Copy the same bytes through the same channel, a whole bucket at a time.

    The channel is a file in memory of the same size, which the two sides map for themselves.
    """
    from megatron.bridge.inference.refit import packing
    from megatron.bridge.inference.refit.packing import SharedBuffer, attached

    size = packing.buffer_bytes(buckets)
    sources = [
        torch.cat([weights[slot.info.name].flatten().view(torch.uint8) for slot in bucket])
        for bucket in buckets
    ]
    targets = [torch.empty_like(source) for source in sources]

    def copy() -> None:
        buffer = SharedBuffer(size)
        other = attached(buffer.path, size)
        for source, target in zip(sources, targets, strict=True):
            buffer.bytes[: source.numel()].copy_(source)
            target.copy_(other[: source.numel()])
        buffer.unlink()

    return copy


def share(engine: Any) -> None:
    """All that an engine on the trainer's chunks needs around a step of the optimizer."""
    with engine.new_weights("keep"):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.bucket_mb << 20
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), "float32")
        measure(folder, model, size, args.rounds)


def measure(folder: str, model: Any, size: int, rounds: int) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.inference.engine import Engine, EngineConfig
    from megatron.bridge.inference.llm import LLM
    from megatron.bridge.inference.refit import packing
    from megatron.bridge.inference.refit.replacement import BucketReader
    from megatron.bridge.inference.refit.sender import send_weights
    from megatron.bridge.inference.refit.stream import WeightStream
    from megatron.bridge.inference.refit.transformers import TransformersReceiver

    bridge = AutoBridge.from_hf_pretrained(folder)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    stream = WeightStream(bridge, chunks)
    everything = sum(info.bytes for info in stream.metadata())
    reader = BucketReader(TransformersReceiver(model))
    shared = Engine([chunk.eval() for chunk in chunks], EngineConfig(64, 49152, kv_memory=1 << 26))
    with LLM(folder, dtype="float32", kv_memory=1 << 28) as llm, shared:
        cases = {
            "floor": floor(dict(stream), packing.layout(stream.metadata(), size)),
            "transformers": lambda: send_weights(stream, reader.take, size),
            "engine": lambda: send_weights(stream, llm.replace_weights, size),
            "own chunks": lambda: share(shared),
            "nothing changed": lambda: send_weights(
                stream, llm.replace_weights, size, changed_only=True
            ),
        }
        for case in cases.values():
            case()
        found = interleaved(cases, rounds)
    seconds = {name: median(timings).wall for name, timings in found.items()}
    memory = {name: median(timings).peak_anonymous for name, timings in found.items()}
    rows = [
        [
            name,
            f"{seconds[name] * 1e3:.2f}",
            f"{seconds['floor'] / seconds[name]:.2f}",
            f"{memory[name] >> 20}",
        ]
        for name in cases
    ]
    print(f"{everything / 1e9:.2f} GB in buckets of {size >> 20} MB")
    print(table(["case", "ms", "speed / floor", "memory MB"], rows))


if __name__ == "__main__":
    main()
