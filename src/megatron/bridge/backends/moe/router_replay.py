# SPDX-License-Identifier: Apache-2.0
"""Record the experts that routers choose, or choose recorded ones.

Megatron-Core's ``RouterReplay`` does both for a whole process: its instances are in one global list, and a trainer
with recomputation must switch all of them before each backward pass. An ``ExpertChoice`` belongs to one router, and
keeps the router's other rules of choice (``models/features/routing.py``). ``ExpertReplay`` recognizes recomputation.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron.bridge.utils.errors import UserError

Routing = tuple[Tensor, Tensor]


class ExpertChoice:
    """Takes the place of a router's replay, the hook with which Megatron-Core allows a different choice of experts.

    Args:
        rule: the hook that the router had, whose choice is recorded.
    """

    layer_number: int | None = None

    def __init__(self, rule: Any = None) -> None:
        self.rule = rule
        self.experts: Tensor | None = None
        """Experts [tokens, topk] to choose; a negative row is chosen by the router. None leaves all to the router."""
        self.record: Callable[[Tensor], None] | None = None
        """Called with the experts [tokens, topk] of each forward pass."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> Routing:
        """Return scores and experts, both [tokens, topk], from scores [tokens, experts]."""
        experts = self.experts
        if experts is None:
            values, chosen = self._choose(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
        else:
            _check_shape(experts, scores, topk)
            chosen = experts.to(scores.device, torch.int64)
            is_open = chosen[:, :1] < 0
            if bool(is_open.any()):
                _, free = self._choose(scores, topk, num_groups, group_topk, default_compute_topk)
                chosen = torch.where(is_open, free, chosen)
            values = self._weigh(scores, chosen)
        if self.record is not None:
            self.record(chosen)
        return values, chosen

    def _choose(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default: Any
    ) -> Routing:
        if self.rule is not None:
            return self.rule.get_replay_topk(scores, topk, num_groups, group_topk, default)
        return default(scores, topk, num_groups=num_groups, group_topk=group_topk)

    def _weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the values that the choice of ``chosen`` has; a rule may compute them from the scores."""
        weigh = getattr(self.rule, "weigh_experts", None)
        return scores.gather(1, chosen) if weigh is None else weigh(scores, chosen)


def _check_shape(experts: Tensor, scores: Tensor, topk: int) -> None:
    if experts.shape != (len(scores), topk):
        raise UserError(
            f"the recorded experts of a layer are {list(experts.shape)}, but its router chooses "
            f"[{len(scores)}, {topk}]: give the experts of each row that the model computes"
        )


def routers_of(chunk: nn.Module) -> Iterator[Any]:
    """Yield the routers of a chunk's decoder in the order of its layers, without those of multi-token prediction."""
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter) and "mtp" not in name.split("."):
            yield module


class _ReplayedChoice(ExpertChoice):
    """Chooses the experts of a microbatch, and the same ones when its layer is recomputed in the backward pass."""

    def __init__(self, rule: Any) -> None:
        super().__init__(rule)
        self._recomputed: deque[Tensor] = deque()
        self._is_recorded_by_autograd = False

    def begin(self, experts: Tensor) -> None:
        self.experts = experts
        self._is_recorded_by_autograd = torch.is_grad_enabled()

    def end(self) -> None:
        self.experts = None

    def get_replay_topk(self, scores: Tensor, *args: Any, **kwargs: Any) -> Routing:
        if self.experts is not None:
            if self._is_recorded_by_autograd and not torch.is_grad_enabled():  # a checkpoint
                self._recomputed.append(self.experts)
            return super().get_replay_topk(scores, *args, **kwargs)
        if not (self._recomputed and torch.is_grad_enabled()):
            return super().get_replay_topk(scores, *args, **kwargs)
        self.experts = (
            self._recomputed.popleft()
        )  # backward passes have the order of forward passes
        try:
            return super().get_replay_topk(scores, *args, **kwargs)
        finally:
            self.experts = None


class ExpertReplay(AbstractContextManager["ExpertReplay"]):
    """Set the experts of microbatches in the training forward pass of this rank's chunks.

    Create it on all ranks together, and keep its context open until the last backward pass. The router's scores of the
    chosen experts, and so its gradients, are computed as always.

    Example:
        >>> with ExpertReplay(model) as replay:  # doctest: +SKIP
        ...     with replay.microbatch(experts):
        ...         losses = model[0](tokens, positions, None, labels=labels)
        ...     losses.sum().backward()
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._routers = [router for chunk in chunks for router in routers_of(chunk)]
        for router in self._routers:
            check_replay(router.config)
        self.layers = _layers_of_stages([router.layer_number for router in self._routers])
        """Numbers of all layers of the model that have experts."""
        self._choices = [_ReplayedChoice(router.router_replay) for router in self._routers]

    def __enter__(self) -> Self:
        for router, choice in zip(self._routers, self._choices, strict=True):
            router.router_replay = choice
        return self

    def __exit__(self, *error: Any) -> None:
        for router, choice in zip(self._routers, self._choices, strict=True):
            router.router_replay = choice.rule

    @contextmanager
    def microbatch(self, experts: Any) -> Iterator[None]:
        """Choose ``experts`` in the forward passes inside the context, and when these are recomputed.

        Args:
            experts: integers [rows, layers, topk] for a packed row, or [batch, sequence, layers, topk]: for each token
                of ``input_ids`` (under context parallelism, for those of this rank), the experts of each layer that has
                any. A token whose experts are negative is routed by its scores.
        """
        rows = torch.as_tensor(experts)
        if rows.dim() not in (3, 4) or rows.size(-2) != len(self.layers):
            raise UserError(
                f"the recorded experts are {list(rows.shape)}, but must be [rows, {len(self.layers)}, topk] or "
                f"[batch, sequence, {len(self.layers)}, topk] for the {len(self.layers)} layers with experts"
            )
        if rows.dim() == 4:
            rows = rows.transpose(0, 1)  # Megatron's tokens are [sequence, batch]
        for router, choice in zip(self._routers, self._choices, strict=True):
            chosen = rows[..., self.layers.index(router.layer_number), :]
            choice.begin(rows_of_rank(chosen, router).reshape(-1, chosen.size(-1)))
        try:
            yield
        finally:
            for choice in self._choices:
                choice.end()


def rows_of_rank(rows: Tensor, router: Any) -> Tensor:
    """Return the part of ``rows`` that reaches this rank's router: all of them without sequence parallelism."""
    size = router.tp_group.size()
    if not router.config.sequence_parallel or size == 1:
        return rows
    if len(rows) % size:
        raise UserError(
            f"{len(rows)} rows of recorded experts cannot be split among {size} sequence-parallel ranks: pad them"
        )
    return rows.chunk(size)[router.tp_group.rank()]


def _layers_of_stages(layers: list[int]) -> list[int]:
    """Return the sorted numbers of the layers of all pipeline stages."""
    group: Any = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        return sorted(layers)
    layers_of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(layers_of_ranks, layers, group=group)
    return sorted(layer for layers in layers_of_ranks for layer in layers)


def check_replay(config: Any, purpose: str = "router replay") -> None:
    """Refuse routers that cannot choose given experts; the message begins with ``purpose``."""
    check_routers(config, purpose)
    if getattr(config, "moe_router_sparsemixer_eps", None) is not None:
        raise UserError(
            f"{purpose} does not work with moe_router_sparsemixer_eps={config.moe_router_sparsemixer_eps}, whose "
            "weights are those of its own choice: leave out the recorded experts"
        )


def check_routers(config: Any, purpose: str) -> None:
    """Refuse routers whose choice has no hook; the message begins with ``purpose``."""
    types = config.moe_router_load_balancing_type
    for kind in (types,) if isinstance(types, str) else types:
        if kind in ("sinkhorn", "quantile_balancing"):
            raise UserError(
                f"{purpose} does not work with moe_router_load_balancing_type={kind!r}, which chooses experts "
                "elsewhere: set model.moe_router_load_balancing_type='none'"
            )
    if config.moe_router_fusion:
        raise UserError(
            f"{purpose} does not work with moe_router_fusion=True: set model.moe_router_fusion=False"
        )
