# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose main parameters have another place: runs that stop and go on are bitwise the runs that do not.

usage: python -m tests.transformer_engine.optimizers OUTPUT

Needs ``scripts/extra.sh te``. The optimizers are those of Transformer Engine and Megatron-Core; Adam's kernels are
written in plain PyTorch, and main parameters say that they are on a GPU while Megatron-Core decides which of them to
offload. Writes a JSON object to OUTPUT: for each case what differs, one line each.
"""

import contextlib
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.transformer_engine import extension

PRECISE = {"use_precision_aware_optimizer": True}
HALF = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
OFFLOADED = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
CASES = {
    "of torch": {},
    "plain": {},
    "remainders": PRECISE,
    "masters": {**PRECISE, "store_param_remainders": False},
    "half moments": {**PRECISE, **HALF},
    "offloaded": {**OFFLOADED, "optimizer_offload_fraction": 1.0},
    "half offloaded": {**OFFLOADED, "optimizer_offload_fraction": 0.5},
    "offloaded, precise": {**OFFLOADED, **PRECISE, "optimizer_offload_fraction": 1.0},
    "half offloaded, precise": {**OFFLOADED, **PRECISE, "optimizer_offload_fraction": 0.5},
}
# case -> another one with the same losses, bit for bit. Remainders round a tie up, and other weights to the even
# number: which of the two happens to a run depends on the last bits of a CPU's products.
TIES: list[int] = []  # that were rounded up to an odd number, by step
EQUAL = {
    "remainders": "plain",
    "masters": "plain",
    "offloaded": "of torch",
    "offloaded, precise": "of torch",
    "half offloaded, precise": "half offloaded",
}


def main(output: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (2, Path(folder)), nprocs=2)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("problems-*")]
    Path(output).write_text(
        json.dumps({case: found[0][case] + found[1][case] for case in CASES}, indent=1)
    )


def run(rank: int, size: int, folder: Path) -> None:
    extension.install()
    install_kernels()
    importlib.import_module("megatron.bridge")
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/ranks", "timeout": timedelta(minutes=5)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **where)
    pretend_hardware()
    losses: dict[str, list[float]] = {}
    problems = {case: prove(case, folder / case.replace(" ", "-"), losses) for case in CASES}
    (folder / f"problems-{rank}").write_text(json.dumps(problems))
    dist.destroy_process_group()


def prove(case: str, folder: Path, losses: dict[str, list[float]]) -> list[str]:
    """What is wrong with one case, on this rank."""
    from tests.functional_tests.checkpoint.runs import run_to

    measured = measure()
    start = functools.partial(run_to, arguments={**arguments(case), "extra": [measured]})
    weights = str(folder.parent / "of-torch" / "straight" / "iter_0000003")
    try:
        with adam_of_torch() if case == "of torch" else contextlib.nullcontext():
            straight = start(folder / "straight", 6)
            start(folder / "stopped", 3)
            resumed = start(folder / "stopped", 6)
            tuned = run_to(None, 6, {**arguments(case), "checkpoint": {}}, pretrained=weights)
    except Exception as error:  # the cases after this one are still worth running
        return [f"{type(error).__name__}: {error}"]
    ties = torch.tensor(sum(TIES))
    TIES.clear()
    dist.all_reduce(ties)
    found = [key for key in straight if straight[key] != resumed[key]]
    losses[case] = [*straight["losses"].values(), *tuned["losses"].values()]
    apart = max(
        abs(one - other)
        for one, other in zip(losses[case], losses[EQUAL.get(case, case)], strict=True)
    )
    if apart and not ties:
        found.append(f"losses differ by {apart}")
    if not case.startswith("half offloaded") and measured.found != measured.predicted:
        found.append(f"{measured.found} bytes per parameter, not {measured.predicted}")
    return found


def measure() -> Any:
    from megatron.bridge.autotune.memory import optimizer_bytes
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.optim.optimizer import torch_optimizers

    class Measure(Callback):
        """Bytes that the optimizer keeps on the GPU for each parameter, and the prediction."""

        def on_train_end(self, context: Any) -> None:
            mains = [main for group in context.optimizer.param_groups for main in group["params"]]
            kept = [main for main in mains if main.dtype == torch.float32]
            for inner in torch_optimizers(context.optimizer):
                kept += [
                    value
                    for parameter, state in inner.state.items()
                    for name, value in state.items()
                    if name != "step" and not hasattr(parameter, "on_cpu")
                ]
            tensors = {value.data_ptr(): value.nbytes for value in kept}
            self.found = sum(tensors.values()) / sum(main.numel() for main in mains)
            self.predicted = optimizer_bytes(context.config, torch.bfloat16)

    return Measure()


@contextlib.contextmanager
def adam_of_torch() -> Iterator[None]:
    from megatron.core import optimizer

    with mock.patch.multiple(optimizer, USING_PYTORCH_OPTIMIZER=True, Adam=torch.optim.AdamW):
        yield


def arguments(case: str) -> dict[str, Any]:
    from megatron.bridge.training.config import OptimizerConfig

    return {
        "model": {"num_layers": 2, "backend": "torch"},
        "mixed_precision": "bf16_mixed",
        "optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, **CASES[case]),
        "ddp": {"use_distributed_optimizer": True},
        "checkpoint": {"save_interval": 3},
    }


def pretend_hardware() -> None:
    """Let a run on this CPU use what needs a GPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from megatron.bridge.training.config.resolve import requirements

    requirements._check_optimizer = lambda config, findings: None
    create = HybridDeviceOptimizer.__init__

    @functools.wraps(create)
    def create_on_a_gpu(*args: Any, **kwargs: Any) -> None:
        with OnAGPU():
            create(*args, **kwargs)

    HybridDeviceOptimizer.__init__ = create_on_a_gpu


class OnAGPU(TorchFunctionMode):
    """Tensors say that they are on a GPU, except for what ``cpu()`` makes and what is made from that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "on_cpu", False)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and (
            func is torch.Tensor.cpu or (args and hasattr(args[0], "on_cpu"))
        ):
            out.on_cpu = True
        return out


def install_kernels() -> None:
    """Adam's kernels, after Transformer Engine's documentation."""
    import transformer_engine_torch as kernels
    from transformer_engine.pytorch import optimizers

    kernels.multi_tensor_adam = _adam
    kernels.multi_tensor_adam_param_remainder = _adam_of_remainders
    optimizers.multi_tensor_l2norm = _norm
    optimizers.multi_tensor_scale = optimizers.multi_tensor_scale_tensor = _scale


def _norm(chunk: int, overflow: Any, lists: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().view(1), None


def _scale(chunk: int, overflow: Any, lists: Any, factor: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def _adam(
    chunk: int,
    overflow: Any,
    lists: Any,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    *rest: Any,
):
    step, decoupled, corrects_bias, decay = rest
    assert decoupled == corrects_bias == 1
    for gradient, weight, first, second, *master in zip(*lists, strict=True):
        main = master[0] if master else weight
        first.copy_(beta1 * first.float() + (1 - beta1) * gradient.float())
        second.copy_(beta2 * second.float() + (1 - beta2) * gradient.float() ** 2)
        denominator = second.float().sqrt() / (1 - beta2**step) ** 0.5 + eps
        main.mul_(1 - lr * decay).sub_(lr / (1 - beta1**step) * first.float() / denominator)
        weight.copy_(main)


def _adam_of_remainders(chunk: int, overflow: Any, lists: Any, *rest: Any) -> None:
    """The bf16 weight has the upper bits of fp32, rounded up if the lower ones, as a signed number, are negative."""
    gradients, weights, firsts, seconds, remainders = lists
    masters = [joined(weight, lower) for weight, lower in zip(weights, remainders, strict=True)]
    _adam(chunk, overflow, [gradients, masters, firsts, seconds], *rest)
    for weight, remainder, master in zip(weights, remainders, masters, strict=True):
        bits = master.view(torch.int32)
        low = (bits << 16) >> 16  # signed
        TIES.append(int(((low == -0x8000) & (bits >> 16 & 1 == 0)).sum()))
        remainder.copy_(low.to(torch.int16))
        upper = (bits - low) >> 16
        weight.view(torch.int16).copy_(upper.to(torch.int16))


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
