# SPDX-License-Identifier: Apache-2.0
"""The provider of Megatron-Core's decoder-only ``GPTModel``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel, gpt_model
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends import further_tokens, layer_specs
from megatron.bridge.models import biases, linear_attention, multipliers, padding, query_scaling, rope
from megatron.bridge.models.model_provider import ModelProvider, without_warnings_of
from megatron.bridge.utils.errors import UserError


@dataclass
class GPTModelProvider(ModelProvider):
    """A ``TransformerConfig`` plus what ``GPTModel`` takes beside it.

    Attributes:
        vocab_size: the true vocabulary; rows of padding are added by ``padded_vocab_size`` only.
        seq_length: the longest sequence that the model is trained on, in tokens.
        max_position_embeddings: positions that the architecture claims, which some rope scalings are relative to;
            None is ``seq_length``.
        short_conv_layers: 1 for each layer with a gated short convolution in the place of attention, over
            ``linear_conv_kernel_dim`` tokens; None has none.
        make_query_groups_divisible_by: append groups of attention heads that are all zero until the number of
            groups divides by this, so that tensor parallelism fits a model whose heads do not split evenly. Such
            heads output zero and get zero gradients: the function that is trained is the same, and an export
            leaves them out.
        should_pad_vocab: pad the vocabulary to a multiple of ``make_vocab_size_divisible_by`` x TP; the rows
            of padding take no part in the softmax.
        rope_parameters: Hugging Face's own description of a scaled rotary embedding (``rope_type``, ``factor``,
            ...); None is the plain one of ``rotary_base``.
        local_rope_parameters: the same, ``rope_theta`` included, for the layers with an attention window; None is
            the one of the other layers.
        query_scaling_beta: how much queries grow beyond the original_max_position_embeddings of
            ``rope_parameters``; None leaves them as they are.
        norm_placement: norms before attention and MLP (``pre``), after them (``post``), or ``both``.
        qk_norm_across_heads: norm queries and keys over the width of all heads together; ``qk_layernorm`` norms
            each head.
        embedding_multiplier: multiplies the embeddings; ``sqrt_hidden_size`` is rounded to their precision, as
            Gemma was trained.
        residual_multiplier: multiplies what attention and MLP add to the residual stream.
        logits_scaling: divides the logits.
        final_logit_softcapping: bounds the logits (after scaling) to +-cap by ``cap * tanh(logits / cap)``.
        attn_logit_softcapping: bounds the scores of attention in the same way.
        attention_bias: False removes the attention's biases where ``add_bias_linear`` is on; None leaves them.
        mlp_bias: the same for the feed-forward layers.
        transformer_layer_spec: a spec, or a function from this config to one; None takes ``backend``'s.
        backend: layer implementation: ``torch``, ``transformer_engine``, or ``auto`` for the best available.
    """

    vocab_size: int | None = None
    seq_length: int = 1024
    max_position_embeddings: int | None = None
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_parameters: dict[str, Any] | None = None
    local_rope_parameters: dict[str, Any] | None = None
    query_scaling_beta: float | None = None
    seq_len_interpolation_factor: float | None = None
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    should_pad_vocab: bool = False
    parallel_output: bool = True
    fp16_lm_cross_entropy: bool = False
    scatter_embedding_sequence_parallel: bool = True
    norm_placement: Literal["pre", "post", "both"] = "pre"
    qk_norm_across_heads: bool = False
    embedding_multiplier: float | Literal["sqrt_hidden_size"] = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    short_conv_layers: list[int] | None = None
    make_query_groups_divisible_by: int = 1
    cuda_graph_modules: Any = field(default_factory=list)  # Megatron-Core's own default is deprecated
    transformer_layer_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None
    backend: str = "auto"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all ranks."""
        if self.vocab_size is None:
            raise UserError("model.vocab_size is not set: give it, or a tokenizer to take it from")
        if not self.should_pad_vocab:
            return self.vocab_size
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return _round_up(self.vocab_size, multiple)

    @property
    def unpadded_heads(self) -> tuple[int, int]:
        """(attention heads, query groups) as declared, without padding."""
        declared = (self.num_attention_heads, self.num_query_groups or self.num_attention_heads)
        return self.__dict__.get("_unpadded_heads", declared)

    @property
    def padded_heads(self) -> tuple[int, int]:
        """(attention heads, query groups) over all ranks, padding included."""
        heads, groups = self.unpadded_heads
        padded = _round_up(groups, self.make_query_groups_divisible_by)
        return padded * (heads // groups), padded

    def derive(self) -> None:
        """Add the padding of attention heads; ``unpadded_heads`` still tells what was declared."""
        super().derive()
        rope.check_parameters(self.rope_parameters or {})
        rope.check_parameters(self.local_rope_parameters or {})
        self._check_layer_lists()
        self._check_expert_biases()
        linear_attention.check(self)
        # layers that differ are saved one by one; Megatron-Core knows that of its own kinds of layers
        self.hetereogenous_dist_checkpoint |= self.short_conv_layers is not None
        self.__dict__["_unpadded_heads"] = self.unpadded_heads
        if self.make_query_groups_divisible_by > 1:
            self.kv_channels = self.kv_channels or self.hidden_size // self.num_attention_heads
            self.num_attention_heads, self.num_query_groups = self.padded_heads

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
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
        with without_warnings_of(gpt_model):
            model = GPTModel(
                transformer_layer_spec=decoder,
                rope_scaling=config.rope_scaling,
                rope_scaling_factor=config.rope_scaling_factor,
                mtp_block_spec=config._mtp_spec(decoder, vp_stage),
                **config._model_arguments(pre_process, post_process, vp_stage),
            )
        further_tokens.share_output_weight(model)
        config._finish(model)
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
            "max_sequence_length": self.seq_length,
            "pre_process": first if pre_process is None else pre_process,
            "post_process": last if post_process is None else post_process,
            "vp_stage": vp_stage,
            **{name: getattr(self, name) for name in same},
        }

    def _finish(self, model: LanguageModule) -> None:
        """Give a built model what Megatron-Core's has not."""
        rope.apply_rope(model, self)
        query_scaling.apply_query_scaling(model, self)
        biases.apply_biases(model, self)
        multipliers.apply_multipliers(model, self)
        padding.apply_padding(model, self)

    def _check_layer_lists(self) -> None:
        for name in ("window_attn_skip_freq", "no_rope_freq", "linear_attention_freq", "short_conv_layers"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.num_layers:
                raise UserError(
                    f"{name} has {len(value)} layers, num_layers={self.num_layers}: give a number for each layer"
                )

    def _check_expert_biases(self) -> None:
        cut = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        if self.num_moe_experts and self.add_bias_linear and cut > 1:
            raise UserError(
                f"expert_tensor_parallel_size={cut} cannot cut experts that have biases: set it to 1 and share "
                "the experts out by expert_model_parallel_size"
            )

    def _decoder_spec(self, vp_stage: int | None) -> Any:
        spec = self.transformer_layer_spec
        if spec is None:
            return layer_specs.decoder_block_spec(self, self.backend, vp_stage)
        return spec if isinstance(spec, ModuleSpec) else spec(self)

    def _mtp_spec(self, decoder: Any, vp_stage: int | None) -> Any:
        if not self.mtp_num_layers:
            return None
        return layer_specs.mtp_block_spec(self, decoder, self.backend, vp_stage)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
