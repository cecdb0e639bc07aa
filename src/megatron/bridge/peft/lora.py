# SPDX-License-Identifier: Apache-2.0
"""LoRA (https://arxiv.org/abs/2106.09685), its removal, and what a merge loses by rounding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import LowRankPart
from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype
from megatron.bridge.models.hf_pretrained.safetensors_files import dtype_name
from megatron.bridge.peft import layers, targets
from megatron.bridge.peft.base import PEFT, bare_chunks
from megatron.bridge.peft.low_rank import Init, LowRank, Shape
from megatron.bridge.peft.targets import Site
from megatron.bridge.utils.errors import UserError


class LoRAAdapter(LowRank):
    """``W x + scaling * B A x``."""

    def forward(  # type: ignore[override]
        self, base: Tensor, x: Tensor, counts: Sequence[int] | None, weights: Sequence[Tensor]
    ) -> Tensor:
        return base + self.path(x, counts)

    def merged_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """``W + scaling * B A`` in fp32: the weights of a layer without adapter that computes the same."""
        return list(torch.stack([weight.float() for weight in weights]) + self.stacked_delta())

    def parts(self, expert: int) -> list[LowRankPart]:
        """The factors of the difference to one of the weights."""
        return [self.part(expert)]


@dataclass
class LowRankPEFT(PEFT):
    """What the low-rank methods share.

    Attributes:
        lora_A_init_method, lora_B_init_method: How the factors start; one of them must be zero, so that training
            starts from the base model.
        dim_by_module, alpha_by_module: Pattern -> another value; the first that matches counts.
    """

    target_modules: list[str] = field(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    """Layers to adapt: names (``linear_qkv``) or patterns of whole names (``*.layers.0.*.linear_qkv``). One that
    matches nothing is refused."""
    exclude_modules: list[str] = field(default_factory=list)
    """Targets to leave out after all, in the same form."""
    dim: int = 32
    """Rank."""
    alpha: float = 32
    """Numerator of the scaling, ``alpha / dim``."""
    use_rslora: bool = False
    """Scale by ``alpha / sqrt(dim)``."""
    dropout: float = 0.0
    """Probability."""
    dropout_position: Literal["pre", "post"] = "pre"
    """Drop inputs of the low-rank path (``pre``) or its outputs (``post``)."""
    lora_A_init_method: Init = "xavier"  # noqa: N815 - a public name
    lora_B_init_method: Init = "zero"  # noqa: N815
    dim_by_module: dict[str, int] = field(default_factory=dict)
    alpha_by_module: dict[str, float] = field(default_factory=dict)
    lora_dtype: torch.dtype | None = None
    """Dtype of the adapters. They have the model's: another one is refused."""
    a2a_experimental: bool = False
    """Exchange outputs instead of inputs between tensor-parallel ranks: only False."""

    def __post_init__(self) -> None:
        """Accept names of dtypes."""
        self.lora_dtype = to_dtype(self.lora_dtype)

    def problems(self, training: bool = True) -> list[str]:
        found = []
        if self.a2a_experimental:
            found.append(
                "peft.a2a_experimental=True is not there: leave it out, the sums are the same"
            )
        if not self.target_modules:
            found.append(
                "peft.target_modules is empty: name the layers to adapt, such as linear_qkv"
            )
        ranks = {
            "peft.dim": self.dim,
            **{f"peft.dim_by_module[{key!r}]": n for key, n in self.dim_by_module.items()},
        }
        found += [f"{key}={rank}: a rank is at least 1" for key, rank in ranks.items() if rank < 1]
        if not 0 <= self.dropout < 1:
            found.append(f"peft.dropout={self.dropout}: a probability is at least 0 and below 1")
        if "zero" not in (self.lora_A_init_method, self.lora_B_init_method):
            found.append(
                "peft.lora_A_init_method and peft.lora_B_init_method are both random, so that training would not "
                "start from the base model: set one to zero"
            )
        if training and self.lora_A_init_method == self.lora_B_init_method == "zero":
            found.append(
                "peft.lora_A_init_method and peft.lora_B_init_method are both zero, so that no gradient would "
                "flow: set one to xavier"
            )
        return [*found, *super().problems(training)]

    def prepare(self, chunks: Sequence[nn.Module]) -> None:
        """Choose the layers of this rank.

        Raises:
            UserError: a pattern matches nothing.
        """
        _refuse_other_dtype(chunks, self.lora_dtype)
        names = [
            name
            for chunk in chunks
            for site in targets.sites(chunk)
            for name in self.names_of(site)
        ]
        self._chosen = targets.chosen(names, self.target_modules, self.exclude_modules)
        targeted = [
            name
            for stage in targets.exchange.all_gather_stages(sorted(self._chosen))
            for name in stage
        ]
        for key in ("dim_by_module", "alpha_by_module"):
            targets.refuse_unmatched(f"peft.{key}", getattr(self, key), targeted)

    def adapt(self, site: Site) -> None:
        """Give a chosen layer its adapter."""
        if self._chosen.intersection(self.names_of(site)):
            targets.check(site)
            layers.attach(site, self.adapter_for(site))

    @contextmanager
    def disable_adapter(self, model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
        """Compute the outputs of the base model, without adapters, inside the context.

        Args:
            model: A chunk or all chunks of this rank, adapted, wrapped or not.

        Raises:
            UserError: ``modules_to_save`` were trained, so the base is not there any more.
        """
        if self.modules_to_save:
            raise UserError(
                f"peft.modules_to_save={self.modules_to_save} are trained in place, so the base model cannot be "
                "had from this one: load it as a second model"
            )
        adapted = [layer for chunk in bare_chunks(model) for layer in layers.adapted(chunk)]
        self._switch(adapted, on=False)
        try:
            yield
        finally:
            self._switch(adapted, on=True)

    @staticmethod
    def _switch(adapted: Sequence[nn.Module], on: bool) -> None:
        for layer in adapted:
            vars(layer)["adapter_is_on"] = on

    def names_of(self, site: Site) -> list[str]:
        """The names of the layer, or of its parts, in targets."""
        return [site.name]

    def adapter_for(self, site: Site) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} must define adapter_for")

    def shape_for(self, name: str) -> Shape:
        """Rank and scaling of the layer, or part, ``name``."""
        return Shape(
            rank=targets.value_for(name, self.dim, self.dim_by_module),
            alpha=targets.value_for(name, self.alpha, self.alpha_by_module),
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            dropout_position=self.dropout_position,
            init_a=self.lora_A_init_method,
            init_b=self.lora_B_init_method,
            seed=self.seed or 0,
        )


def _refuse_other_dtype(chunks: Sequence[nn.Module], asked: torch.dtype | None) -> None:
    dtype = getattr(chunks[0].config, "params_dtype", None)
    if asked is not None and dtype is not None and asked != dtype:
        raise UserError(
            f"peft.lora_dtype={dtype_name(asked)}: adapters have the model's dtype, {dtype_name(dtype)}; leave it out"
        )


@dataclass
class LoRA(LowRankPEFT):
    """One low-rank path for each targeted layer; fused layers are adapted as a whole.

    Example:
        >>> LoRA(target_modules=["linear_qkv"], dim=8, alpha=16).dim
        8
    """

    def adapter_for(self, site: Site) -> nn.Module:
        """One pair of factors for all outputs."""
        return LoRAAdapter(site, self.shape_for(site.name))


class LoRAMerge:
    """Adds adapters to the weights, and removes them."""

    @torch.no_grad()
    def __call__(
        self, model: nn.Module | list[nn.Module], training: bool = False
    ) -> nn.Module | list[nn.Module]:
        """Merge in place; sums are computed in fp32 and rounded once.

        Args:
            model: A chunk or all chunks of this rank, wrapped or not; all ranks that share a weight call this.
            training: Whether the weights are to be trained on.

        Returns:
            The same model.
        """
        for chunk in bare_chunks(model):
            for module in list(layers.adapted(chunk)):
                merged = [module.merged_weight(weight) for weight in module.adapted_site.weights]
                for weight, value in zip(module.adapted_site.weights, merged, strict=True):
                    weight.copy_(value)
                layers.detach(module)
            info = chunk_info(chunk)
            info.peft, info.trained = None, frozenset()
            chunk.requires_grad_(training)
        return model


@torch.no_grad()
def rounding_loss(model: Sequence[nn.Module], dtype: torch.dtype | None = None) -> float:
    """The fraction of the adapters' effect on the weights that is lost to rounding.

    With W the weights and M the merged weights in fp32, it is ``|round(M) - M| / |M - W|``, with Frobenius norms over
    all adapted weights of this rank; 0 without adapters.

    Args:
        model: The chunks of the model.
        dtype: What the sums are rounded to; None is the dtype of each weight.
    """
    lost, effect = 0.0, 0.0
    for chunk in bare_chunks(model):
        for module in layers.adapted(chunk):
            weights = module.adapted_site.weights
            for weight, merged in zip(weights, module.adapter.merged_weights(weights), strict=True):
                lost += float((merged.to(dtype or weight.dtype).float() - merged).square().sum())
                effect += float((merged - weight.float()).square().sum())
    return (lost / effect) ** 0.5 if effect else 0.0


@torch.no_grad()
def subtract(model: list[nn.Module]) -> None:
    """Negate all adapters of a model whose weights already include them.

    The model, and an export with ``merge_adapter_weights``, then equal the base model up to the rounding of the merged
    weights.
    """
    for chunk in bare_chunks(model):
        for module in layers.adapted(chunk):
            for weight in module.adapted_site.weights:
                for part in module.low_rank_parts(weight):
                    if part.magnitude is not None:
                        raise UserError(
                            "DoRA cannot be taken out of a merged model, as the lengths of the base's rows are "
                            "lost: go back to the base itself"
                        )
                    part.b.neg_()
