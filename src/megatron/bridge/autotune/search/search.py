# SPDX-License-Identifier: Apache-2.0
"""Search the fastest layouts that fit: enumerate, check rules, estimate, and simulate the best."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.profile import Profile
from megatron.bridge.autotune.search.candidate import (
    FREE,
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    SWITCHES,
    Candidate,
    Recompute,
    Space,
    powers_of_two,
)
from megatron.bridge.autotune.search.price import Price, Pricer
from megatron.bridge.autotune.time.simulate import makespan
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.rules import (
    RULES,
    SIZE_RULES,
    experts,
    fields,
    layout,
    performance,
    stages,
    violations,
)
from megatron.bridge.utils.errors import UserError

# Rules that depend only on the layout; ``resolve`` checks the others for the finalists.
_LAYOUT_RULES = [
    rule
    for rule in RULES
    if rule.__module__ in {experts.__name__, layout.__name__, stages.__name__}
]

# Rules on sizes that a layout changes. Those on all numbers held when the config was resolved, and they take most of
# the time of a check.
_SIZE_RULES = [rule for rule in SIZE_RULES if rule.__module__ != fields.__name__]

# The rules that must hold before the model can be built.
_EARLY_RULES = [
    layout.tp_divides_heads,
    layout.tp_fits_query_groups,
    layout.tp_divides_ffn,
    layout.tp_divides_vocabulary,
    *(rule for rule in _LAYOUT_RULES if rule.__module__ == experts.__name__),
]
_SWITCH_RULES = [
    rule for rule in RULES if rule.__module__ in {performance.__name__, layout.__name__}
]
_VALUE, _NUMBER = re.compile(r"=\d+\b"), re.compile(r"\b\d+\b")

# Number of candidates that are simulated; simulation moves a candidate by fewer places than this.
FINALISTS = 40

# A switch must reduce the time to this fraction to be worth its setting.
_WORTH = 0.998

# Number of the fastest finalists for which communication switches are tried.
_SWITCHED = 12

# Minimum tokens per context rank: attention over shorter parts is inefficient.
LONG = 2048


@dataclass(frozen=True)
class Found:
    best: list[Price]  # the fastest candidates that fit, fastest first
    tried: int  # number of candidates that the rules allow
    refused: Counter[
        str
    ]  # messages of rules without numbers, and how many candidates each rule refused
    too_large: int  # number of allowed candidates that exceed the budget
    # bytes and layout of the candidate that needs the least memory, if any was counted
    smallest: tuple[int, Candidate] | None


class Search:
    """Finds the fastest layouts of a resolved config on ``world_size`` GPUs named ``card``.

    A rank may use ``budget`` bytes; None means all memory of the GPU. ``fixed`` fixes fields of ``Candidate``, and
    ``free`` names the dimensions of ``FREE`` to search. If ``switches`` is true, the search tries to overlap
    communication. With a ``profile``, times and memory are those of its device.
    """

    def __init__(
        self,
        config: ConfigContainer,
        world_size: int,
        card: str,
        budget: int | None = None,
        fixed: Mapping[str, Any] | None = None,
        profile: Profile | None = None,
        free: Iterable[str] = (),
        switches: bool = True,
    ) -> None:
        self.config = config
        self.world_size = world_size
        memory = gpu(card).memory if profile is None else profile.memory
        self.budget = memory if budget is None else budget
        self.pricer = Pricer(config, world_size, card, profile)
        self.recomputes: tuple[Recompute, ...] = _recompute_kinds(config)
        freed = {name: FREE[name] for name in free}
        self.space = Space({**_search_space(config, world_size).sizes, **freed}).fixed(
            **(fixed or {})
        )
        self.switches = SWITCHES if switches and self.pricer.kernels.overlaps else ()

    def run(self, top: int = 10) -> Found:
        """Search the whole space and return the ``top`` fastest candidates."""
        refused: Counter[str] = Counter()
        prices: list[Price] = []
        tried = too_large = 0
        smallest: tuple[int, Candidate] | None = None
        for candidate in self.space.candidates():
            if problems := self.problems(candidate):
                refused.update(
                    {
                        _NUMBER.sub("N", _VALUE.sub("", problem)).split(":")[0]
                        for problem in problems
                    }
                )
                continue
            tried += 1
            price, least_memory = self._first_that_fits(candidate)
            if least_memory is not None and (smallest is None or least_memory[0] < smallest[0]):
                smallest = least_memory
            if price is None:
                too_large += 1
            else:
                prices.append(price)
        return Found(self._simulated(prices)[:top], tried, refused, too_large, smallest)

    def problems(self, candidate: Candidate) -> list[str]:
        """Return the rules of training that a candidate violates; none if it is allowed."""
        config = self.pricer.configured(candidate)
        if problems := violations(_SIZE_RULES, config, self.world_size) or [
            *self._batch_problems(candidate)
        ]:
            return problems
        if problems := violations(_EARLY_RULES, config, self.world_size):
            return problems
        try:
            divided = self.pricer.divide(candidate)
        except UserError as error:  # building the model checks the model's own rules
            return [str(error)]
        if divided is None:
            return [
                f"{candidate.pipeline} x {candidate.virtual} stages: there are too few layers for them"
            ]
        return violations(_LAYOUT_RULES, self.pricer.configured(divided[0]), self.world_size)

    def price(self, candidate: Candidate) -> Price | None:
        return self.pricer.price(candidate, makespan)

    def _batch_problems(self, candidate: Candidate) -> Iterable[str]:
        batch = self.config.train.global_batch_size * (candidate.batch or 1)
        ranks = candidate.tensor * candidate.pipeline * candidate.context
        samples = candidate.micro_batch * (self.world_size // ranks)
        if not samples or batch % samples:
            yield f"micro batch x data-parallel size={samples} does not divide train.global_batch_size={batch}"
        elif candidate.virtual > 1 and batch // samples % candidate.pipeline:
            yield "interleaved stages need a number of microbatches that the pipeline stages divide"
        elif candidate.virtual > 1 and candidate.pipeline == 1:
            yield "virtual stages need a pipeline"

    def _first_that_fits(
        self, candidate: Candidate
    ) -> tuple[Price | None, tuple[int, Candidate] | None]:
        """Return the cost with the least recomputation that fits, and the memory and candidate of the last try."""
        if self.pricer.states(candidate, self.pricer.configured(candidate)) > self.budget:
            return None, None
        least_memory = None
        for recompute in (
            (candidate.recompute,) if candidate.recompute != NO_RECOMPUTE else self.recomputes
        ):
            recomputing = replace(candidate, recompute=recompute)
            memory = self.pricer.memory(recomputing)
            if memory is None:
                break
            least_memory = max(memory), recomputing
            if least_memory[0] <= self.budget:
                return self.pricer.price(recomputing, memory=memory), least_memory
        return None, least_memory

    def _simulated(self, prices: list[Price]) -> list[Price]:
        prices.sort(key=lambda price: price.seconds_per_token)
        plain = [replace(fast_price.candidate, layout=None) for fast_price in prices[:FINALISTS]]
        finalists = [price for candidate in plain if (price := self._recomputing_least(candidate))]
        finalists.sort(key=lambda price: price.seconds_per_token)
        switched = [self._switched(price) for price in finalists[:_SWITCHED]]
        return sorted(
            [*switched, *finalists[_SWITCHED:]], key=lambda price: price.seconds_per_token
        )

    def _recomputing_least(self, candidate: Candidate) -> Price | None:
        """Return the cost of the candidate or, if faster, with full recomputation of some layers of each chunk only."""
        choices = (candidate, *self._with_block(candidate))
        return min(
            filter(None, map(self.price, choices)),
            key=lambda price: price.seconds_per_token,
            default=None,
        )

    def _with_block(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with the fewest such layers that fit; none if no or all layers must be recomputed."""
        if candidate.recompute not in self.recomputes[1:] or self.config.model.mtp_num_layers:
            return []  # Megatron-Core does not support block recomputation with multi-token prediction
        layers_per_chunk = -(
            -self.config.model.num_layers // (candidate.pipeline * candidate.virtual)
        )
        blocks = [
            replace(candidate, recompute=("full", "block", count, None))
            for count in range(1, layers_per_chunk)
        ]
        fewest = bisect_left(
            blocks,
            True,
            key=lambda block_candidate: (
                max(self.pricer.memory(block_candidate) or (0,)) <= self.budget
            ),
        )
        return blocks[fewest : fewest + 1]

    def _switched(self, price: Price) -> Price:
        known = set(self._switch_problems(price.candidate))
        for switch in self.switches:
            before = {key: value for key, value in price.candidate.switches if key != switch[0]}
            candidate = replace(price.candidate, layout=None, switches=(*before.items(), switch))
            if known.issuperset(self._switch_problems(candidate)) and (
                switched_price := self.price(candidate)
            ):
                price = (
                    switched_price
                    if switched_price.fullest <= self.budget
                    and switched_price.seconds_per_token < _WORTH * price.seconds_per_token
                    else price
                )
        return price

    def _switch_problems(self, candidate: Candidate) -> list[str]:
        return violations(_SWITCH_RULES, self.pricer.configured(candidate), self.world_size)

    @cached_property
    def current(self) -> Candidate:
        return candidate_of(self.config)


def candidate_of(config: ConfigContainer) -> Candidate:
    model: Any = config.model
    modules = model.recompute_modules
    recompute: Recompute = NO_RECOMPUTE
    if model.recompute_granularity == "full":
        recompute = ("full", model.recompute_method, model.recompute_num_layers, None)
    elif model.recompute_granularity == "selective":
        recompute = ("selective", None, None, tuple(modules or ("core_attn",)))
    return Candidate(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        virtual=model.virtual_pipeline_model_parallel_size or 1,
        expert=model.expert_model_parallel_size,
        expert_tensor=_expert_tensor(model),
        micro_batch=config.train.micro_batch_size,
        recompute=recompute,
    )


def _expert_tensor(model: Any) -> int | None:
    """Return the field of ``Candidate``: None if experts are split like other layers."""
    ranks = model.expert_tensor_ranks
    same = ranks > 1 and ranks == model.tensor_model_parallel_size
    return None if same or not model.num_moe_experts else ranks


def _search_space(config: ConfigContainer, world_size: int) -> Space:
    model: Any = config.model
    experts = model.num_moe_experts or 0
    length = config.dataset.seq_length
    expert = tuple(size for size in powers_of_two(min(experts, world_size)) if experts % size == 0)
    tensor = tuple(
        size for size in powers_of_two(min(8, world_size)) if model.num_attention_heads % size == 0
    )
    stages = powers_of_two(min(world_size, model.num_layers, 64))
    return Space(
        {
            "tensor": tensor,
            "context": powers_of_two(max(1, min(world_size, length // LONG))),
            "pipeline": (1,) if getattr(model, "has_own_stages", False) else stages,
            "virtual": tuple(
                size for size in range(1, 13) if size in (1, 2, 4) or model.num_layers % size == 0
            ),
            "expert": expert if experts else (1,),
            "expert_tensor": ((1,) if model.add_bias_linear else (1, None)) if experts else (None,),
            "micro_batch": tuple(
                size for size in powers_of_two(8) if config.train.global_batch_size % size == 0
            ),
        }
    )


def _recompute_kinds(config: ConfigContainer) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation in the order of their cost, from none to full."""
    model: Any = config.model
    if model.num_moe_experts:
        parts = [("layernorm", "moe_act"), ("layernorm", "moe_act", "mla_up_proj")]
        parts = parts[: 1 + bool(model.multi_latent_attention)]
    else:
        parts = [("layernorm",), ("layernorm", "mlp")]
    selective: list[Recompute] = [("selective", None, None, modules) for modules in parts]
    return (NO_RECOMPUTE, *selective, FULL_RECOMPUTE)
