# SPDX-License-Identifier: Apache-2.0
"""The provider of Megatron-Core's decoder-only ``GPTModel``."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel, gpt_model
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.bridge.backends.kernels import mtp_loss
from megatron.bridge.backends.specs import layer_features, layer_specs
from megatron.bridge.backends.specs.layer_features import NormPlacement, ParallelResidual
from megatron.bridge.models.features import rope
from megatron.bridge.models.features.feature import ToySizes
from megatron.bridge.models.features.registry import FEATURES, FeatureFields
from megatron.bridge.models.model_provider import ModelProvider, silenced
from megatron.bridge.utils.config.ranges import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    FRACTION,
)
from megatron.bridge.utils.errors import UserError, one_line, refuse
from megatron.bridge.utils.optional_imports import lazy_names
from megatron.bridge.utils.user_functions import failure_of, function_name
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size


@dataclass
class DecoderFields:
    """What every decoder has; settings of features are beside the features (``features.registry``)."""

    vocab_size: Annotated[int | None, AT_LEAST_ONE] = None
    """The true vocabulary; rows of padding are added by ``padded_vocab_size`` only."""
    seq_length: int = 1024
    """The longest sequence that the model is trained on, in tokens."""
    max_position_embeddings: Annotated[int | None, AT_LEAST_ONE] = None
    """Positions that the architecture claims, which some rope scalings are relative to; None is ``seq_length``."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    position_offset: Annotated[int, AT_LEAST_ZERO] = 0
    """Rows of the table of learned positions above that of the first position, which nothing reads."""
    rotary_base: Annotated[float, ABOVE_ZERO] = 10000.0
    rotary_percent: Annotated[float, FRACTION] = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: Annotated[float, ABOVE_ZERO] = 8.0
    rope_parameters: dict[str, Any] | None = None
    """Hugging Face's own description of a scaled rotary embedding (``rope_type``, ``factor``, ...); None is the
    plain one of ``rotary_base``."""
    local_rope_parameters: dict[str, Any] | None = None
    """The same, ``rope_theta`` included, for the layers with an attention window; None is the one of the other
    layers."""
    rotary_reversed: bool = False
    """Rotate pairs of dimensions in the opposite direction (NanoChat)."""
    query_scaling_beta: Annotated[float | None, AT_LEAST_ZERO] = None
    """How much queries grow beyond the original_max_position_embeddings of ``rope_parameters``; None leaves them
    as they are."""
    query_scaling_length: Annotated[int | None, AT_LEAST_ONE] = None
    """Queries grow by ``query_scaling_beta`` beyond this length instead, only in the layers without a rotary
    embedding (``no_rope_freq``), and positions count from 1 (Llama 4)."""
    chunked_attention: bool = False
    """Where a layer has a window, tokens see those of their own chunk, which is as long as the window (Llama 4)."""
    seq_len_interpolation_factor: Annotated[float | None, ABOVE_ZERO] = None
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: Annotated[int, AT_LEAST_ONE] = 128
    should_pad_vocab: bool = False
    """Pad the vocabulary to a multiple of ``make_vocab_size_divisible_by`` x TP; the rows of padding take no part
    in the softmax."""
    parallel_output: bool = True
    fp16_lm_cross_entropy: bool = False
    scatter_embedding_sequence_parallel: bool = True
    norm_placement: NormPlacement = "pre"
    """Norms before attention and MLP (``pre``), after them (``post``), or ``both``."""
    qk_norm_across_heads: bool = False
    """Norm queries and keys over the width of all heads together; ``qk_layernorm`` norms each head."""
    qk_norm_by_head: bool = False
    """Norm queries and keys by a LayerNorm with a gain, and no bias, for each head."""
    qk_norm_after_rope: bool = False
    """Apply the norms of ``qk_layernorm`` after the rotary embedding."""
    norm_gain: bool = True
    """Norms have a trained gain; False leaves it out (``backend='torch'`` only)."""
    layernorm_bias: bool = True
    """LayerNorms have a bias; False leaves it out (``backend='torch'`` only)."""
    parallel_residual: ParallelResidual | None = None
    """Attention and MLP both read the input of the layer: through one norm (``shared_norm``) or each through its
    own (``own_norms``). None lets the MLP read what attention has added to the input."""
    cuda_graph_modules: Any = field(
        default_factory=list
    )  # Megatron-Core's own default is deprecated
    transformer_layer_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None
    """A spec, or a function from this config, and if it has one from ``vp_stage``, to one; None takes
    ``backend``'s."""


@dataclass
class GPTModelProvider(FeatureFields, DecoderFields, ModelProvider):
    """A ``TransformerConfig`` plus what ``GPTModel`` takes beside it.

    Attributes:
        backend: layer implementation: ``torch``, ``transformer_engine``, or ``auto`` for the best available.
    """

    _model_class: ClassVar[type[Any]] = GPTModel

    _unpadded_heads: tuple[int, int] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all ranks."""
        if self.vocab_size is None:
            raise UserError("model.vocab_size is not set: give it, or a tokenizer to take it from")
        if not self.should_pad_vocab:
            return self.vocab_size
        sizes = (self.make_vocab_size_divisible_by, self.tensor_model_parallel_size)
        return calculate_padded_vocab_size(self.vocab_size, *sizes)

    @property
    def unpadded_heads(self) -> tuple[int, int]:
        """(attention heads, query groups) as declared, without padding."""
        declared = (self.num_attention_heads, self.num_query_groups or self.num_attention_heads)
        return self._unpadded_heads or declared

    @property
    def padded_heads(self) -> tuple[int, int]:
        """(attention heads, query groups) over all ranks, padding included."""
        heads, groups = self.unpadded_heads
        padded = (
            -(-groups // self.make_query_groups_divisible_by) * self.make_query_groups_divisible_by
        )
        return padded * (heads // groups), padded

    def derive(self) -> None:
        """Add the padding of attention heads; ``unpadded_heads`` still tells what was declared."""
        self._check_init_methods()
        super().derive()
        rope.check_parameters(self.rope_parameters or {})
        rope.check_parameters(self.local_rope_parameters or {}, "local_rope_parameters")
        self._check_activation()
        self._check_expert_biases()
        self._check_positions()
        refuse(self.feature_problems())
        for feature in FEATURES:
            feature.derive(self)
        self._unpadded_heads = self.unpadded_heads
        if self.make_query_groups_divisible_by > 1:
            self.kv_channels = self.kv_channels or self.hidden_size // self.num_attention_heads
            self.num_attention_heads, self.num_query_groups = self.padded_heads

    def get_config_for_layer(self, layer_number: int) -> Self:
        """The config that layer ``layer_number``, counted from one, is built with."""
        config = copy.copy(self)
        for feature in FEATURES:
            feature.change_layer_config(config, self, layer_number)
        return config

    def change_layer_spec(
        self, spec: ModuleSpec, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        """Add all features to the spec of a layer; ``layer_specs.decoder_block_spec`` calls it.

        Args:
            spec: Of a decoder layer.
            layer_number: Counted from one; None in a hybrid model, whose layers of a kind share a spec.
            provider: Chooses the classes of linear layers, norms and attention; it is that of a backend.
        """
        for feature in FEATURES:
            spec = feature.change_layer_spec(spec, self, layer_number, provider)
        return spec

    def feature_problems(self) -> Iterator[str]:
        """Yield what prevents the features from being built, a sentence for each problem."""
        problems = list(self._list_problems())
        if problems:  # the checks of features read the lists
            yield from problems
            return
        for feature in FEATURES:
            yield from feature.check(self)

    def prediction_notes(self) -> Iterator[str]:
        """Yield what predictions of memory and time assume or leave out, for a dry run to say."""
        for feature in FEATURES:
            yield from feature.notes(self)

    @property
    def per_layer_fields(self) -> tuple[str, ...]:
        """The names of fields that may have a number for each layer."""
        of_features = [name for feature in FEATURES for name in feature.per_layer]
        return ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", *of_features)

    @property
    def has_periodic_layers(self) -> bool:
        """Whether the architecture describes its layers by a period, so that a small model has whole periods."""
        return any(feature.has_periods(self) for feature in FEATURES)

    def toy_sizes(self, toy: ToySizes) -> dict[str, Any]:
        """Return the settings of features in the small model of a rehearsal."""
        sizes: dict[str, Any] = {}
        for feature in FEATURES:
            sizes |= feature.toy_sizes(self, toy)
        return sizes

    def provide(
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Build the ``GPTModel`` chunk of one pipeline stage.

        Args:
            pre_process: whether the chunk holds the embedding; None asks the process groups.
            post_process: whether the chunk holds the output layer; None asks the process groups.
            vp_stage: index of the virtual stage, None without virtual pipelining.
        """
        config = self.resolved()
        decoder = config._decoder_spec(vp_stage)
        # Megatron-Core 0.19 says at every chunk that HybridModel succeeds GPTModel: users cannot act on that here
        with silenced(gpt_model):
            model = config._model_class(
                transformer_layer_spec=decoder,
                rope_scaling=config.rope_scaling,
                rope_scaling_factor=config.rope_scaling_factor,
                mtp_block_spec=config._mtp_spec(decoder, vp_stage),
                **config._model_arguments(pre_process, post_process, vp_stage),
            )
        mtp_loss.share_output_weight(model)
        config.finish(model)
        return model

    def _model_arguments(
        self, pre_process: bool | None, post_process: bool | None, vp_stage: int | None
    ) -> dict[str, Any]:
        """What every language model of Megatron-Core takes."""
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        same = (
            "fp16_lm_cross_entropy",
            "parallel_output",
            "share_embeddings_and_output_weights",
            "position_embedding_type",
            "rotary_percent",
            "rotary_base",
            "scatter_embedding_sequence_parallel",
            "seq_len_interpolation_factor",
        )
        return {
            "config": self,
            "vocab_size": self.padded_vocab_size,
            "max_sequence_length": self._positions,
            "pre_process": first if pre_process is None else pre_process,
            "post_process": last if post_process is None else post_process,
            "vp_stage": vp_stage,
            **{name: getattr(self, name) for name in same},
        }

    @property
    def _positions(self) -> int:
        """Rows of the table of learned positions; elsewhere only the length of the training."""
        learned = (
            self.position_embedding_type == "learned_absolute" and self.max_position_embeddings
        )
        return (
            (self.max_position_embeddings or 0) + self.position_offset
            if learned
            else self.seq_length
        )

    def edit_layer_spec(self, spec: ModuleSpec) -> ModuleSpec:
        """The spec of a decoder layer as this model has it; called for each layer of each chunk.

        For subclasses. Layers share specs, so return a copy with the changes (``dataclasses.replace``).

        Args:
            spec: of a layer, with all features that the fields declare. Its ``submodules`` tell a layer with
                experts from one without.
        """
        return spec

    def finish(self, model: LanguageModule) -> None:
        """Give a built chunk what Megatron-Core's has not; a subclass that adds to it calls ``super().finish``.

        Args:
            model: has parameters, without values of a checkpoint yet; ``self`` is the resolved config.
        """
        layer_features.keep_lengths_without_rope(model, self)
        rope.apply_rope(model, self)
        _offset_positions(model, self.position_offset)
        for feature in FEATURES:
            feature.change_model(model, self)

    def _refuse_ineffective(self, defaults: Mapping[str, Any], context: str) -> None:
        """Refuse fields that have no effect ``context`` and are not at their defaults."""
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                raise UserError(
                    f"{name}={value!r} has no effect {context}: set model.{name}={default!r}"
                )

    def _check_positions(self) -> None:
        """Refuse sequences that are longer than the table of learned positions."""
        if (
            self.position_embedding_type != "learned_absolute"
            or self.max_position_embeddings is None
        ):
            return
        if self.seq_length > self.max_position_embeddings:
            raise UserError(
                f"seq_length={self.seq_length} is more than max_position_embeddings={self.max_position_embeddings}, "
                "the positions that this model has learned: use shorter sequences"
            )

    def _list_problems(self) -> Iterator[str]:
        """Yield a sentence for each list that has not a number for each layer."""
        checked_elsewhere = ("moe_layer_freq", "block_configs")
        for name in self.per_layer_fields:
            value = getattr(self, name)
            if name in checked_elsewhere:
                continue
            if isinstance(value, list) and len(value) != self.num_layers:
                yield (
                    f"{name} has {len(value)} layers, num_layers={self.num_layers}: give a number for each layer"
                )

    def _check_expert_biases(self) -> None:
        if self._has_expert_biases and self.expert_tensor_ranks > 1:
            raise UserError(
                f"expert_tensor_parallel_size={self.expert_tensor_ranks} cannot cut experts that have biases: "
                "leave it unset and share the experts out by expert_model_parallel_size"
            )

    def _decoder_spec(self, vp_stage: int | None) -> Any:
        spec: Any = self.transformer_layer_spec
        if spec is None:
            spec = layer_specs.decoder_block_spec(self, self.backend, vp_stage)
        elif not isinstance(spec, ModuleSpec):
            spec = self._call_layer_spec(spec, vp_stage)
        if isinstance(spec, ModuleSpec):
            return self.edit_layer_spec(spec)
        return replace(
            spec, layer_specs=[self.edit_layer_spec(layer) for layer in spec.layer_specs or []]
        )

    def _call_layer_spec(self, function: Callable[..., Any], vp_stage: int | None) -> Any:
        """Return the spec from the function that the user named, which may take ``vp_stage``."""
        key = "transformer_layer_spec"
        takes_stage = "vp_stage" in inspect.signature(function).parameters
        options: dict[str, Any] = {"vp_stage": vp_stage} if takes_stage else {}
        try:
            spec = function(self, **options)
        except TypeError as error:
            raise failure_of(key, function, error) from error
        if not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
            raise UserError(
                f"{key}={function_name(function)} returns a {type(spec).__name__}: name a function from the "
                "model's config to a ModuleSpec"
            )
        return spec

    def _check_init_methods(self) -> None:
        """Try the user's functions for the first weights on a small matrix, without a change of random states."""
        for key in ("init_method", "output_layer_init_method", "embedding_init_method"):
            function: Any = getattr(self, key)
            if function is None:
                continue
            usage = "name a function that fills a tensor in place, such as torch.nn.init.xavier_uniform_"
            weights = torch.full((4, 4), torch.nan, device="cpu")
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                try:
                    function(weights)
                except Exception as error:
                    raise UserError(
                        f"{key}={function_name(function)} does not fill a tensor ({one_line(error)}): {usage}"
                    ) from error
            if not weights.isfinite().all():
                raise UserError(
                    f"{key}={function_name(function)} leaves a tensor unfilled: {usage}"
                )

    def _check_activation(self) -> None:
        """Refuse what is no function of a tensor; one that needs a GPU may fail here, and is not refused."""
        function: Any = self.activation_func
        usage = "name a function from a tensor to a tensor of its shape, such as torch.nn.functional.silu"
        named = f"activation_func={function_name(function)}"
        if isinstance(function, type):
            raise UserError(f"{named} is a class: {usage}")
        example = torch.zeros(1, 4)
        try:
            output = function(example)
        except TypeError as error:
            raise UserError(f"{named} takes no tensor ({one_line(error)}): {usage}") from error
        except Exception:
            return
        if not isinstance(output, torch.Tensor) or output.shape != example.shape:
            raise UserError(f"{named} returns no tensor of the same shape: {usage}")

    def _mtp_spec(self, decoder: Any, vp_stage: int | None) -> Any:
        if not self.mtp_num_layers:
            return None
        return layer_specs.mtp_block_spec(self, decoder, self.backend, vp_stage)


def pad_query_groups(provider: Any) -> int | None:
    """Pad heads where tensor parallelism cannot share the query groups; their number without padding, else None."""
    heads = provider.num_attention_heads
    groups = provider.num_query_groups or provider.num_attention_heads
    ranks = provider.tensor_model_parallel_size
    # Megatron-Core replicates fewer groups than ranks, provided that the numbers divide
    if not (groups % ranks and (ranks % groups or heads % ranks)):
        return None
    provider.make_query_groups_divisible_by = ranks
    return groups


def _offset_positions(model: LanguageModule, offset: int) -> None:
    """Start the learned positions of ``model`` at row ``offset`` of their table."""
    if offset and hasattr(model, "embedding"):
        table = model.get_submodule("embedding.position_embeddings")
        table.register_forward_pre_hook(lambda _, inputs: (inputs[0] + offset,))


# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "default_layer_spec": "megatron.bridge.compat.layer_specs:default_layer_spec",
        "local_layer_spec": "megatron.bridge.compat.layer_specs:local_layer_spec",
        "modelopt_transformer_layer_spec": "megatron.bridge.compat.layer_specs:modelopt_transformer_layer_spec",
        "transformer_engine_layer_spec": "megatron.bridge.compat.layer_specs:transformer_engine_layer_spec",
    },
)
