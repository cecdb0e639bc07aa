# SPDX-License-Identifier: Apache-2.0
"""The provider of a ``GPTModel`` with multi-latent attention."""

from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron.bridge.models.features import rope
from megatron.bridge.models.features.feature import ToySizes
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError

# fields of other kinds of attention -> the value with which they change nothing
_WITHOUT_EFFECT: dict[str, Any] = {
    "rope_scaling": False,
    "seq_len_interpolation_factor": None,
    "local_rope_parameters": None,
    "rotary_percent": 1.0,
    "make_query_groups_divisible_by": 1,
}


@dataclass
class MLAModelProvider(GPTModelProvider, MLATransformerConfig):
    """A ``MLATransformerConfig`` with all that ``GPTModelProvider`` adds.

    Attributes:
        rope_type: ``rope`` or ``yarn``, Megatron-Core's own rules; ``rope_parameters`` replaces them.
    """

    multi_latent_attention: bool = True
    normalization: str = "RMSNorm"
    q_lora_rank: int | None = 512  # type: ignore[assignment] - Megatron-Core takes None and does not say so
    """Rank of the queries' latent; None projects the hidden states to queries directly."""
    latent_layernorm_epsilon: float | None = None
    """Epsilon of the norms of both latents; None is ``layernorm_epsilon``."""

    def derive(self) -> None:
        """Refuse what has no effect on latent attention, and fill in what Megatron-Core reads."""
        super().derive()
        without = (
            {} if self.position_embedding_type == "none" else {"position_embedding_type": "rope"}
        )
        self._refuse_ineffective({**_WITHOUT_EFFECT, **without}, "with multi-latent attention")
        self.kv_channels = self.v_head_dim  # what a head gives to the output projection
        rope.derive_latent_rope(self)
        self._check_layout()

    def toy_sizes(self, toy: ToySizes) -> dict[str, Any]:
        """Add the widths of latents and heads."""
        sizes = {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_head_dim": toy.head_dim,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": toy.head_dim,
        }
        used = {name: size for name, size in sizes.items() if getattr(self, name)}
        return super().toy_sizes(toy) | used

    def _check_layout(self) -> None:
        # Transformer Engine's down projections are complete on every rank, and a rank has only its own heads' part of
        # the gradient of the keys with positions; Megatron-Core adds the parts up under sequence parallelism alone
        ranks = self.tensor_model_parallel_size
        if self.backend == "transformer_engine" and ranks > 1 and not self.sequence_parallel:
            raise UserError(
                f"tensor_model_parallel_size={ranks} without sequence_parallel gives wrong gradients of latent "
                "attention with backend='transformer_engine': set model.sequence_parallel=True"
            )
        # the other backend cuts them
        latents = {"q_lora_rank": self.q_lora_rank or 0}
        latents["kv_lora_rank + qk_pos_emb_head_dim"] = self.kv_lora_rank + self.qk_pos_emb_head_dim
        for name, width in latents.items():
            if self.backend == "torch" and width % ranks:
                raise UserError(
                    f"tensor_model_parallel_size={ranks} does not divide {name}={width}: choose another"
                )

    def finish(self, model: LanguageModule) -> None:
        """Add the positions and the epsilons of latent attention."""
        super().finish(model)
        rope.apply_latent_rope(model, self)
        _set_latent_epsilon(model, self.latent_layernorm_epsilon)


def _set_latent_epsilon(model: LanguageModule, epsilon: float | None) -> None:
    if epsilon is None:
        return
    for module in model.modules():
        if isinstance(module, MultiLatentAttention):
            # Transformer Engine fuses each norm into the projection behind it
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                if hasattr(getattr(module, name, None), "eps"):
                    getattr(module, name).eps = epsilon
