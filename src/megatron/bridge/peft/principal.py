# SPDX-License-Identifier: Apache-2.0
"""PiSSA (https://arxiv.org/abs/2404.02948): factors that start as the principal part of the weight they update."""

import re
from typing import cast

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.peft.targets import Group, Site
from megatron.bridge.utils.errors import UserError

_NAME = re.compile(r"pissa(?:_niter_(\d+))?")


def is_known(init: str) -> bool:
    """Return whether ``init`` is a name that ``peft`` has for PiSSA: ``pissa`` or ``pissa_niter_<number>``."""
    return _NAME.fullmatch(init) is not None


def gather_matrix(local: Tensor, site: Site) -> Tensor:
    """Return the full matrix of a weight, or of a part of it, in fp32.

    Args:
        local: This rank's shard, [halves?, outputs, inputs].
        site: The layer of the weight, which says how it is cut.
    """
    matrix = local.detach().float().contiguous()
    ranks = site.group.size()
    if ranks == 1 or site.kind == "replicated":
        return matrix
    shards = exchange.all_gather(matrix, site.group, ranks)
    return torch.cat(shards, dim=-2 if site.kind == "column" else -1)


def compute_factors(
    matrix: Tensor, rank: int, init: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return A [rank, inputs] and B [outputs, rank], whose product is the principal part of a matrix.

    Args:
        matrix: [outputs, inputs] in fp32.
        rank: Number of singular values.
        init: ``pissa``, or ``pissa_niter_<number>`` for a fast approximation with as many iterations.
        generator: Of the CPU, for the approximation.
    """
    name = _NAME.fullmatch(init)
    assert name is not None, f"{init} was checked with the config"
    if name[1] is None:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        left, values, right = _approximate_svd(matrix, rank, int(name[1]), generator)
    roots = values[:rank].sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def _approximate_svd(
    matrix: Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first singular vectors and values by subspace iteration from random directions."""
    start = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix.device)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(iterations):
        other_basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ other_basis).Q
    left, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    return basis @ left, values, right


def share_factors(factors: tuple[Tensor, Tensor], site: Site) -> None:
    """Give all ranks that hold a layer the factors of the first one: another device may round otherwise."""
    if site.experts is None:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        replicas = parallel_state.get_expert_data_parallel_group()
    for group in (site.group, cast(Group, replicas)):
        if group.size() > 1:
            for factor in factors:
                torch.distributed.broadcast(factor, group=group, group_src=0)


def check_rank(rank: int, matrix: Tensor, name: str) -> None:
    """Refuse a rank above the number of singular values."""
    if rank > min(matrix.shape):
        raise UserError(
            f"peft.dim={rank} is more than the {min(matrix.shape)} singular values of {name}, from which "
            "peft.init_lora_weights starts: set a lower rank, for this layer in peft.dim_by_module"
        )
