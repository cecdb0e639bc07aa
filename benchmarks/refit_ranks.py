# SPDX-License-Identifier: Apache-2.0
"""Refit of a trainer with two ranks to transformers in a third process, against a raw copy of as many bytes.

``torchrun --nproc-per-node 2 -m benchmarks.refit_ranks DIR --layout tp2`` (or pp2, ep2). The raw copy takes the
same way, a whole bucket at a time: what the other rank holds over gloo into the shared buffer, the rest by
``copy_``, and out of the buffer in the receiving process.
"""

import argparse
import multiprocessing
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import interleaved, table

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16},
    "ep2": {"expert_model_parallel_size": 2},
}
DENSE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
EXPERTS = {
    "hidden_size": 1024,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}
SHARED = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 65536,
    "tie_word_embeddings": True,
}


def toy(folder: Path, experts: bool) -> Any:
    """About 0.5 billion parameters in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {**EXPERTS, "num_experts": 16, "num_experts_per_tok": 2} if experts else DENSE
    name = "Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"
    kind = "qwen3_moe" if experts else "qwen3"
    config = AutoConfig.for_model(kind, **own, **SHARED, dtype="bfloat16", architectures=[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


class Flat:
    """A receiver that copies whole buckets."""

    def begin(self, infos: Any, partial: bool = False) -> None:
        if not hasattr(self, "targets"):
            self.targets = {info.name: torch.empty(info.shape, dtype=info.dtype) for info in infos}

    def receive(self, name: str, weight: torch.Tensor) -> None:
        self.targets[name].copy_(weight)

    def finish(self) -> None:
        pass


def receive(folder: str, address: str, experts: bool) -> None:
    """The receiving process: refits are model, raw, model, raw, ..., as rank 0 announces them."""
    from megatron.bridge.inference.refit.replacement import BucketReader, receive_weights
    from megatron.bridge.inference.refit.transformers import TransformersReceiver

    torch.set_num_threads(1)
    with Listener(address) as listener:
        readers = {
            "refit": BucketReader(TransformersReceiver(toy(Path(folder), experts))),
            "raw": BucketReader(Flat()),
        }
        Path(f"{address}.ready").touch()
        with listener.accept() as connection:
            while (case := connection.recv()) is not None:
                receive_weights(connection, readers[case])


def remote_bytes(stream: Any) -> int:
    """How many of the bytes rank 0 does not hold."""
    total = 0
    for task in stream._plan.tasks:
        size = (
            0
            if task.is_copy
            else sum(info.bytes for info in stream.metadata([task])) or _expert_bytes(task)
        )
        away = task.owner.stage > 0 or bool(task.owner.expert_rank)
        total += size if away else size * (task.shard.parts - 1) // task.shard.parts
    return total


def _expert_bytes(task: Any) -> int:
    return (
        sum(
            torch.Size(shape).numel() for shape in task.mapping.hf_slice_shapes(task.shard).values()
        )
        * 2
    )


class Raw:
    """The part of ``WeightStream`` that sending needs, of whole buckets."""

    def __init__(self, stream: Any, bucket_bytes: int) -> None:
        from megatron.bridge.inference.refit import packing
        from megatron.bridge.inference.refit.stream import WeightInfo

        buckets = packing.layout(stream.metadata(), bucket_bytes)
        self.sizes = [bucket[-1].stop - bucket[0].start for bucket in buckets]
        self.infos = [
            WeightInfo(str(index), (size,), torch.uint8) for index, size in enumerate(self.sizes)
        ]
        self.mine = [torch.zeros(size, dtype=torch.uint8) for size in self.sizes]
        self.share = remote_bytes(stream) / sum(self.sizes)

    def metadata(self, tasks: Any = None) -> Any:
        return self.infos

    def writes(self, tasks: Any = None) -> Any:
        for source in self.mine:
            cut = int(self.share * len(source))
            if dist.get_rank():
                dist.send(source[:cut], 0)
                yield None
                continue

            def write(target: torch.Tensor, source: torch.Tensor = source, cut: int = cut) -> None:
                dist.recv(target[:cut], 1)
                target[cut:].copy_(source[cut:])

            yield write


def main() -> None:  # noqa: PLR0915 - a script
    from megatron.bridge import AutoBridge
    from megatron.bridge.inference.refit.replacement import RemoteReceiver
    from megatron.bridge.inference.refit.sender import send_weights
    from megatron.bridge.inference.refit.stream import WeightStream

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty one, for the model")
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), args.bucket_mb << 20
    address, experts = str(args.folder / "socket"), args.layout == "ep2"
    if rank == 0:
        process = multiprocessing.get_context("spawn").Process(
            target=receive, args=(str(args.folder / "model"), address, experts), daemon=True
        )
        process.start()
        while not Path(f"{address}.ready").exists():
            process.join(0.2)
    dist.barrier()
    bridge = AutoBridge.from_hf_pretrained(args.folder / "model")
    provider = bridge.to_megatron_provider()
    for name, value in LAYOUTS[args.layout].items():
        setattr(provider, name, value)
    stream = WeightStream(bridge, provider.provide_distributed_model(wrap_with_ddp=False))
    raw: Any = Raw(stream, size)
    connection: Any = Client(address) if rank == 0 else None

    def send(case: str, source: Any) -> None:
        dist.barrier()
        if connection is not None:
            connection.send(case)
        send_weights(source, None if connection is None else RemoteReceiver(connection), size)

    cases = {"raw": lambda: send("raw", raw), "refit": lambda: send("refit", stream)}
    for case in cases.values():
        case()
    found = interleaved(cases, args.rounds)
    if connection is not None:
        connection.send(None)
        best = {name: sorted(timing.wall for timing in timings) for name, timings in found.items()}
        gigabytes = sum(info.bytes for info in stream.metadata()) / 1e9
        rows = [[name, *(f"{wall:.2f}" for wall in walls)] for name, walls in best.items()]
        print(f"{args.layout}: {gigabytes:.2f} GB, {raw.share:.0%} of them from the other rank")
        print(table(["case", *["s"] * args.rounds], rows))
        print(
            f"median, refit / raw: {best['refit'][args.rounds // 2] / best['raw'][args.rounds // 2]:.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
