# SPDX-License-Identifier: Apache-2.0
"""Rules of routing that Megatron-Core's router lacks: other groups, weights not normalized, corrected, SparseMixer.

``moe_router_group_score`` ranks groups of experts by the best expert, or the two best, of each. Megatron-Core ranks
them by the sum of their ``topk / group_topk`` best scores, which are two in DeepSeek-V3. In DeepSeek-V2 the best score
alone ranks them (``group_limited_greedy``).

``moe_router_norm_topk=False`` leaves sigmoids as they are; Megatron-Core divides those of a token by their sum.
``moe_router_norm_min`` is ERNIE 4.5's rule: probabilities over all experts, chosen by probability plus correction.
``moe_router_sparsemixer_eps`` is Phi-3.5-MoE's rule (Liu et al., "GRIN", 2024, arXiv:2409.12136) as the model is
evaluated. Training follows the same choice; its authors drew the experts at random.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.utils.config.ranges import AT_LEAST_ZERO

Routing = tuple[Tensor, Tensor]

_BEST = {"max": 1, "two": 2}
"""Values of ``moe_router_group_score`` that Megatron-Core does not have -> scores of a group that are added up."""


class BestExpertGroups:
    """Replaces a router's replay, the hook with which Megatron-Core allows a different choice of experts."""

    layer_number: int | None = None

    def __init__(self, best: int) -> None:
        self._best = best  # scores of a group that are added up to rank it

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, _default: Any
    ) -> Routing:
        """(scores, experts), both [tokens, topk], from scores [tokens, experts]."""
        groups = scores.view(len(scores), num_groups, -1)
        chosen = groups.topk(self._best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
        limited = groups.masked_fill(hidden[..., None], float("-inf")).flatten(1)
        return limited.topk(topk, dim=-1)


class CorrectedSoftmax:
    """Replaces a router's replay as well."""

    layer_number: int | None = None

    def __init__(self, router: Any, smallest: float) -> None:
        self._router = router
        self._smallest = smallest

    def get_replay_topk(self, scores: Tensor, topk: int, *_: Any) -> Routing:
        """(weights, experts), both [tokens, topk], from probabilities [tokens, experts]."""
        experts = (scores + self._router.expert_bias).topk(topk, dim=-1).indices
        return self.weigh_experts(scores, experts), experts

    def weigh_experts(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights of chosen experts, both [tokens, topk]."""
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True).clamp(min=self._smallest)


@dataclass
class RoutingFields:
    moe_router_group_score: Literal["sum", "two", "max"] = "sum"
    """What ranks the groups of experts: the ``sum`` of the ``moe_router_topk / moe_router_group_topk`` best scores in
    a group, of the ``two`` best ones, or the best score alone (``max``), as DeepSeek-V2 was trained."""
    moe_router_norm_topk: bool = True
    """The sigmoids of the chosen experts are divided by their sum; False leaves them as they are."""
    moe_router_norm_min: Annotated[float | None, AT_LEAST_ZERO] = None
    """Scores are a softmax over all experts; a correction, trained without gradients, helps to choose, and what is
    chosen is divided by its sum, or by this number where the sum is smaller. None has no such correction."""
    moe_router_sparsemixer_eps: Annotated[float | None, AT_LEAST_ZERO] = None
    """Each chosen expert is weighed by a softmax over those left whose scores are within twice this share of its own
    (SparseMixer); None is a softmax over the chosen ones."""


class RoutingFeature(LayerFeature):
    """Its settings need ``num_moe_experts``, like all that begin with ``moe_``."""

    pricing = {
        "moe_router_group_score": "numbers",
        "moe_router_norm_topk": "numbers",
        "moe_router_norm_min": "numbers",
        "moe_router_sparsemixer_eps": "numbers",
    }

    def check(self, config: Any) -> Iterator[str]:
        return _bypassing_settings(config)

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_routing(model, config)


def _bypassing_settings(config: Any) -> Iterator[str]:
    """Yield a sentence for each setting that bypasses these routing rules."""
    if _ranks_groups(config):
        yield from _other_choices(config, "moe_router_group_score")
    rules = {
        "moe_router_norm_topk": (True, "sigmoid"),
        "moe_router_norm_min": (None, "softmax"),
        "moe_router_sparsemixer_eps": (None, "softmax"),
    }
    for name, (default, kind) in rules.items():
        value = getattr(config, name)
        if config.num_moe_experts is None or value == default:
            continue
        yield from _other_choices(config, name)
        if config.moe_router_score_function != kind:
            yield (
                f"{name}={value} is for moe_router_score_function={kind!r}, which is "
                f"{config.moe_router_score_function!r}: set model.{name}={default}"
            )


def _other_choices(config: Any, rule: str) -> Iterator[str]:
    """Yield a sentence for each setting that chooses experts outside of the router's own code."""
    for name in ("moe_router_fusion", "moe_enable_routing_replay"):
        if getattr(config, name):
            value = getattr(config, rule)
            yield f"{rule}={value!r} does not work with {name}=True: set model.{name}=False"


def _ranks_groups(config: Any) -> bool:
    return config.moe_router_group_score in _BEST and bool(config.moe_router_num_groups)


def apply_routing(model: nn.Module, config: Any) -> None:
    """Apply the rules that ``config`` declares to the routers of ``model``."""
    eps = config.moe_router_sparsemixer_eps
    routers: list[Any] = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        if _ranks_groups(config):
            router.router_replay = BestExpertGroups(_BEST[config.moe_router_group_score])
        if config.moe_router_norm_min is not None:
            _correct_router(router, config.moe_router_norm_min)
        elif eps is not None:
            router.routing = partial(_sparse_mixer, router.routing, config, eps)
        elif (
            not config.moe_router_norm_topk and config.moe_router_topk > 1
        ):  # Megatron-Core does not normalize a single one
            router.routing = partial(_undo_normalization, router.routing, config.num_moe_experts)
    if config.moe_router_norm_min is not None:
        config.moe_router_enable_expert_bias = (
            True  # of the resolved copy: Megatron-Core trains the correction
        )


def _correct_router(router: Any, smallest: float) -> None:
    zeros = torch.zeros_like(router.weight[:, 0], dtype=torch.float32)
    del router.local_tokens_per_expert, router.expert_bias  # None so far
    router.register_buffer("local_tokens_per_expert", zeros, persistent=False)
    router.register_buffer("expert_bias", zeros.clone())
    router.enable_expert_bias = True
    router.router_replay = CorrectedSoftmax(router, smallest)


def _undo_normalization(
    normalized: Callable[..., Routing], experts: int, logits: Tensor, *args: Any, **kwargs: Any
) -> Routing:
    weights, chosen = normalized(logits, *args, **kwargs)
    total = (logits.view(-1, experts).float().sigmoid() * chosen).sum(-1, keepdim=True)
    return (weights * total).type_as(weights), chosen


def sparse_mixer(scores: Tensor, topk: int, eps: float) -> Tensor:
    """Weights [tokens, experts] of the ``topk`` best scores; all others are zero."""
    weights = torch.zeros_like(scores)
    left = scores
    for _ in range(topk):
        best, expert = left.max(-1, keepdim=True)
        far = (best - scores) / torch.maximum(scores.abs(), best) > 2 * eps
        shares = left.masked_fill(far, -torch.inf).softmax(-1)
        weights = weights.scatter(-1, expert, shares.gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    return weights


def _sparse_mixer(
    usual: Callable[..., Routing],
    config: Any,
    eps: float,
    logits: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Routing:
    weights, chosen = usual(logits, *args, **kwargs)
    mixed = sparse_mixer(
        logits.view(-1, config.num_moe_experts).float(), config.moe_router_topk, eps
    )
    # Megatron-Core has attached the auxiliary losses to its weights, and they need no gradient of these
    return mixed.type_as(weights) + 0 * weights, chosen
