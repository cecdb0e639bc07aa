# SPDX-License-Identifier: Apache-2.0
"""Coalesced collectives of Megatron-Core on gloo, between two processes."""

import megatron.core  # noqa: F401  its import replaces collectives on CPUs
import pytest
import torch
import torch.distributed as dist


def results(async_ops: bool) -> dict[str, list[list[float]]]:
    rank = dist.get_rank()
    cut = [torch.tensor([1.0 + rank]), torch.tensor([3.0 + 2 * rank, 4.0 + 2 * rank])]
    whole = [torch.empty(2 * len(part)) for part in cut]
    summed = [torch.full((2,), 1.0 + rank), torch.tensor([3.0 + rank])]
    scattered = [torch.empty(1), torch.empty(1)]

    def forbidden(*arguments):
        raise AssertionError("gloo's coalesced collectives corrupt memory")

    with pytest.MonkeyPatch.context() as patched:
        for name in ("allgather_into_tensor", "reduce_scatter_tensor", "allreduce"):
            patched.setattr(dist.ProcessGroup, f"{name}_coalesced", forbidden)
        with dist._coalescing_manager(async_ops=async_ops) as gathers:
            for part, output in zip(cut, whole, strict=True):
                dist.all_gather_into_tensor(output, part, async_op=async_ops)
        with dist._coalescing_manager(async_ops=async_ops) as sums:
            for tensor in summed:
                dist.all_reduce(tensor)
        with dist._coalescing_manager(async_ops=async_ops) as scatters:
            for index, output in enumerate(scattered):
                dist.reduce_scatter_tensor(output, torch.arange(2.0) + index + 1)
        for manager in (gathers, sums, scatters) if async_ops else ():
            manager.wait()
    found = {"gather": whole, "sum": summed, "scatter": scattered}
    return {name: [tensor.tolist() for tensor in tensors] for name, tensors in found.items()}


@pytest.mark.parametrize("async_ops", [False, True])
def test_each_tensor_has_its_own_collective(two_workers, async_ops):
    first, second = two_workers.run(results, async_ops)
    assert first == {
        "gather": [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]],
        "sum": [[3.0, 3.0], [7.0]],
        "scatter": [[2.0], [4.0]],
    }
    assert second == first | {"scatter": [[4.0], [6.0]]}
