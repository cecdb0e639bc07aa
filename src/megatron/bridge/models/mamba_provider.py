# SPDX-License-Identifier: Apache-2.0
"""The provider of Megatron-Core's hybrid models: Mamba-2 layers among attention, feed-forward and experts."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends.specs import layer_features
from megatron.bridge.backends.specs.hybrid_specs import hybrid_stack_spec
from megatron.bridge.models.features.feature import ToySizes, kernels_note
from megatron.bridge.models.features.registry import plain_layer_values
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.model_provider import EVEN_STAGES
from megatron.bridge.utils.config.ranges import BELOW_ONE
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import lazy_names
from megatron.bridge.utils.user_functions import function_name

MAMBA, ATTENTION, FEED_FORWARD, EXPERTS, STAGE = "M*-E|"
KINDS = {MAMBA: "Mamba", ATTENTION: "attention", FEED_FORWARD: "feed-forward", EXPERTS: "experts"}

# fields of a plain decoder -> the value with which they change nothing
_WITHOUT_EFFECT: dict[str, Any] = {
    "transformer_layer_spec": None,
    **layer_features.OFF,
    **plain_layer_values(),
    "rope_scaling": False,
    "mtp_num_layers": None,
    "moe_layer_freq": 1,
    **EVEN_STAGES,
}


@dataclass
class MambaModelProvider(GPTModelProvider):
    """A ``GPTModelProvider`` whose layers have one job each, as ``hybrid_override_pattern`` says."""

    _model_class: ClassVar[type[Any]] = HybridModel

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "none"
    normalization: str = "RMSNorm"
    add_bias_linear: bool = False
    hidden_dropout: Annotated[float, BELOW_ONE] = 0.0
    hybrid_override_pattern: str | None = None
    """A symbol for each of ``num_layers``: ``M`` Mamba-2, ``*`` attention, ``-`` feed-forward, ``E`` experts.
    ``|`` between them cuts the stack into (virtual) pipeline stages, in order; without it, stages have equally
    many layers."""
    hybrid_stack_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None
    """A spec of the layers, or a function to one, from this config or without arguments; None takes
    ``backend``'s."""
    mamba_chunk_size: int = 128
    """Tokens that are computed as one matrix; changes speed and memory, not numbers."""
    mamba_first_step_min: float = 0.001
    """A new model's steps are spread from here, evenly in their logarithm."""
    mamba_first_step_max: float = 0.1
    """To here."""
    mamba_first_step_floor: float = 1e-4
    """And never below this."""

    @property
    def mamba_stack_spec(self) -> Any:
        """``hybrid_stack_spec`` under the name that older programs set."""
        return self.hybrid_stack_spec

    @mamba_stack_spec.setter
    def mamba_stack_spec(self, spec: Any) -> None:
        self.hybrid_stack_spec = spec

    @property
    def layer_kinds(self) -> str:
        """A symbol for each layer, without the borders of stages."""
        return (self.hybrid_override_pattern or "").replace(STAGE, "")

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba layer; as many as fill twice the hidden size unless given."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def has_own_stages(self) -> bool:
        """Whether the pattern says where pipeline stages begin."""
        return STAGE in (self.hybrid_override_pattern or "")

    def derive(self) -> None:
        """Refuse what has no effect on a hybrid model, and what its layers cannot be built from."""
        super().derive()
        layers_with_experts = [int(kind == EXPERTS) for kind in self.layer_kinds]
        if self.moe_layer_freq == layers_with_experts:  # as it is derived below
            self.moe_layer_freq = 1
        self._refuse_ineffective(_WITHOUT_EFFECT, "on a hybrid model")
        if self.backend == "transformer_engine" and (self.qk_layernorm or self.qk_l2_norm):
            raise UserError(
                "hybrid models with normed queries and keys need other layers than backend='transformer_engine' "
                "has: set model.backend='torch'"
            )
        self.check_pattern()
        self._check_mamba()
        self.staged_pattern()
        if self.num_moe_experts is not None:
            # read where auxiliary losses are averaged over the layers that have them
            self.moe_layer_freq = layers_with_experts

    def provide(  # type: ignore[override] - Megatron-Core's hybrid model is no GPTModel
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Build the ``HybridModel`` chunk of one pipeline stage; see ``GPTModelProvider.provide``."""
        config = self.resolved()
        model = config._model_class(
            hybrid_stack_spec=config._stack_spec(),
            hybrid_layer_pattern=config.staged_pattern(),
            **config._model_arguments(pre_process, post_process, vp_stage),
        )
        config.finish(model)
        return model

    def _stack_spec(self) -> ModuleSpec:
        stack = self._own_stack() or hybrid_stack_spec(self, self.backend)
        layers: Any = stack.submodules
        kinds = ("mamba_layer", "attention_layer", "mlp_layer", "moe_layer")
        specs = {kind: getattr(layers, kind) for kind in kinds}
        edited = {
            kind: self.edit_layer_spec(spec)
            for kind, spec in specs.items()
            if isinstance(spec, ModuleSpec)
        }
        return replace(stack, submodules=replace(layers, **edited))

    def _own_stack(self) -> ModuleSpec | None:
        """Return the spec that ``mamba_stack_spec`` asks for."""
        spec = self.hybrid_stack_spec
        if spec is None or isinstance(spec, ModuleSpec):
            return spec
        stack = spec(self) if inspect.signature(spec).parameters else spec()
        if not isinstance(stack, ModuleSpec):
            raise UserError(
                f"hybrid_stack_spec={function_name(spec)} returns a {type(stack).__name__}: name a function to the "
                "ModuleSpec of a stack of layers"
            )
        return stack

    def toy_sizes(self, toy: ToySizes) -> dict[str, Any]:
        """Add sizes of Mamba layers with enough heads and groups for every rank."""
        heads = max(8, 2 * toy.head_ranks)
        return super().toy_sizes(toy) | {
            "mamba_num_heads": heads,
            "mamba_head_dim": 2 * toy.hidden_size // heads,  # transformers expands the width twice
            "mamba_state_dim": 16,
            "mamba_num_groups": max(toy.tensor, min(self.mamba_num_groups, 2)),
            "mamba_chunk_size": 16,
        }

    def prediction_notes(self) -> Iterator[str]:
        """Add the kernels that are assumed."""
        yield from super().prediction_notes()
        if MAMBA in self.layer_kinds:
            yield kernels_note("mamba-ssm")

    def check_pattern(self) -> None:
        """Refuse a pattern with unknown symbols, or one that does not fit the number of layers."""
        pattern = self.hybrid_override_pattern
        symbols = ", ".join(f"{symbol} {kind}" for symbol, kind in KINDS.items())
        if not pattern:
            raise UserError(
                f"hybrid_override_pattern={pattern} has no layers: give a symbol for each layer, {symbols}"
            )
        if not isinstance(pattern, str):
            raise UserError(f"hybrid_override_pattern={pattern!r} is no text of symbols: {symbols}")
        for symbol in self.layer_kinds:
            if symbol not in KINDS:
                raise UserError(
                    f"hybrid_override_pattern={pattern} has {symbol!r}: use only {symbols}, and {STAGE} between "
                    "pipeline stages"
                )
        if len(self.layer_kinds) != self.num_layers:
            raise UserError(
                f"hybrid_override_pattern has {len(self.layer_kinds)} layers, num_layers={self.num_layers}: make "
                "them agree"
            )
        if (EXPERTS in self.layer_kinds) != bool(self.num_moe_experts):
            raise UserError(
                f"hybrid_override_pattern has {self.layer_kinds.count(EXPERTS)} layers of experts (E) but "
                f"num_moe_experts={self.num_moe_experts}: make them agree"
            )

    def _check_mamba(self) -> None:
        """Each rank gets complete groups of heads; context parallelism may cut a group."""
        if MAMBA not in self.layer_kinds:
            return
        ranks = self.tensor_model_parallel_size
        parts = self.context_parallel_size
        heads = self.mamba_heads
        groups = self.mamba_num_groups
        if heads % groups:
            raise UserError(f"mamba_num_groups={groups} does not divide mamba_num_heads={heads}")
        if groups % ranks:
            raise UserError(
                f"tensor_model_parallel_size={ranks} does not divide mamba_num_groups={groups}: a rank computes "
                "complete groups of Mamba heads"
            )
        groups_per_rank = groups // ranks
        if heads // ranks % parts or max(groups_per_rank, parts) % min(groups_per_rank, parts):
            raise UserError(
                f"context_parallel_size={parts} cannot share out a tensor-parallel rank's {heads // ranks} Mamba "
                f"heads in {groups_per_rank} groups: use a divisor of both"
            )

    def staged_pattern(self) -> str:
        """The pattern with a border before each (virtual) pipeline stage, as Megatron-Core wants it.

        Raises:
            UserError: the stages do not come out even, or are not as many as the pattern has.
        """
        stages = self.pipeline_model_parallel_size * (
            self.virtual_pipeline_model_parallel_size or 1
        )
        pattern = self.hybrid_override_pattern or ""
        if self.has_own_stages:
            if pattern.count(STAGE) + 1 != stages:
                raise UserError(
                    f"hybrid_override_pattern has {pattern.count(STAGE) + 1} stages, pipeline_model_parallel_size "
                    f"x virtual_pipeline_model_parallel_size is {stages}: make them agree"
                )
            return pattern
        if self.num_layers % stages:
            raise UserError(
                f"{stages} pipeline stages do not divide num_layers={self.num_layers}: cut the layers with | in "
                "hybrid_override_pattern"
            )
        layers_per_stage = self.num_layers // stages
        return STAGE.join(
            pattern[start : start + layers_per_stage]
            for start in range(0, self.num_layers, layers_per_stage)
        )


# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "get_default_mamba_stack_spec": "megatron.bridge.compat.layer_specs:get_default_mamba_stack_spec",
        "modelopt_mamba_stack_spec": "megatron.bridge.compat.layer_specs:modelopt_mamba_stack_spec",
        "transformer_engine_mamba_stack_spec": "megatron.bridge.compat.layer_specs:transformer_engine_mamba_stack_spec",
    },
)
