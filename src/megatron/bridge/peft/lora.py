# SPDX-License-Identifier: Apache-2.0
"""LoRA (https://arxiv.org/abs/2106.09685), its removal, and what a merge loses by rounding."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn

from megatron.bridge.backends.low_bit.weight import LowBitWeight
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import LowRankPart
from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype
from megatron.bridge.models.hf_pretrained.safetensors_files import dtype_name
from megatron.bridge.models.vision import provider as vision_provider
from megatron.bridge.peft import layers, low_bit_base, principal, targets
from megatron.bridge.peft.base import PEFT, bare_chunks
from megatron.bridge.peft.fused_parts import CanonicalAdapter, check_queries, parts_of
from megatron.bridge.peft.hf_names import HFModules
from megatron.bridge.peft.low_rank import Init, LoRAShape, LowRank
from megatron.bridge.peft.targets import Site, TargetCandidate
from megatron.bridge.utils.config.ranges import ABOVE_ZERO
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

    adapts_parts: ClassVar[bool] = False
    """Whether parts of a fused layer can have separate factors."""
    parts_have_names: ClassVar[bool] = False
    """Whether targets name the parts of a fused layer (``linear_q``) instead of the layer."""

    target_modules: list[str] = field(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    """Layers to adapt: Megatron's names (``linear_qkv``), Hugging Face's (``q_proj``), patterns of whole names
    (``*.layers.0.*.linear_qkv``), or ``all-linear``. One that matches nothing is refused."""
    exclude_modules: list[str] = field(default_factory=list)
    """Targets to leave out after all, in the same form."""
    dim: int = 32
    """Rank."""
    alpha: Annotated[float, ABOVE_ZERO] = 32
    """Numerator of the scaling, ``alpha / dim``."""
    use_rslora: bool = False
    """Scale by ``alpha / sqrt(dim)``."""
    loraplus_lr_ratio: float | None = None
    """Learning rate of the factors B divided by that of A (LoRA+), at least 1; None is the same rate."""
    dropout: float = 0.0
    """Probability."""
    dropout_position: Literal["pre", "post"] = "pre"
    """Drop inputs of the low-rank path (``pre``) or its outputs (``post``)."""
    lora_A_init_method: Init = "xavier"  # noqa: N815 - a public name
    lora_B_init_method: Init = "zero"  # noqa: N815
    init_lora_weights: str | None = None
    """Start A and B as the principal part of the weight and train it apart from the rest (PiSSA): ``pissa``, or
    ``pissa_niter_16`` for a fast approximation in 16 iterations. None starts as the two settings above say."""
    dim_by_module: dict[str, int] = field(default_factory=dict)
    alpha_by_module: dict[str, float] = field(default_factory=dict)
    lora_dtype: torch.dtype | None = None
    """Dtype of the adapters. They have the model's: another one is refused."""
    a2a_experimental: bool = False
    """Exchange outputs instead of inputs between tensor-parallel ranks: only False."""

    def __post_init__(self) -> None:
        """Accept names of dtypes."""
        self.lora_dtype = to_dtype(self.lora_dtype)
        self._chosen: dict[str, TargetCandidate] = {}
        self._selected_by: dict[str, set[str]] = {}
        self._is_filled_later = False

    def __call__(self, model: nn.Module | list[nn.Module], training: bool = True) -> Any:
        self._is_filled_later = not training
        return super().__call__(model, training)

    def problems(self, training: bool = True) -> list[str]:
        problems = []
        if self.a2a_experimental:
            problems.append(
                "peft.a2a_experimental=True is not supported: remove it, the result is the same"
            )
        if isinstance(self.target_modules, str):
            problems.append(
                f"peft.target_modules={self.target_modules!r} must be a list: "
                f"write [{self.target_modules!r}]"
            )
        # an adapter that only has other weights can be loaded, but is no LoRA to train
        if not self.target_modules and (training or not self.modules_to_save):
            problems.append(
                "peft.target_modules is empty: name the layers to adapt, such as linear_qkv"
            )
        ranks = {
            "peft.dim": self.dim,
            **{f"peft.dim_by_module[{key!r}]": n for key, n in self.dim_by_module.items()},
        }
        problems += [
            f"{key}={rank}: a rank is at least 1, a whole number"
            for key, rank in ranks.items()
            if not isinstance(rank, int) or rank < 1
        ]
        alphas = {"peft.alpha": self.alpha}
        for pattern, alpha in self.alpha_by_module.items():
            alphas[f"peft.alpha_by_module[{pattern!r}]"] = alpha
        for key, alpha in alphas.items():
            # a loaded adapter may be switched off by an alpha of 0
            if not math.isfinite(alpha) or (training and alpha <= 0):
                problems.append(f"{key}={alpha}: must be a finite number above 0")
        if not 0 <= self.dropout < 1:
            problems.append(f"peft.dropout={self.dropout}: a probability is at least 0 and below 1")
        if "zero" not in (self.lora_A_init_method, self.lora_B_init_method):
            problems.append(
                "peft.lora_A_init_method and peft.lora_B_init_method are both random, so that training would not "
                "start from the base model: set one to zero"
            )
        if training and self.lora_A_init_method == self.lora_B_init_method == "zero":
            problems.append(
                "peft.lora_A_init_method and peft.lora_B_init_method are both zero, so that no gradient would "
                "flow: set one to xavier"
            )
        return [
            *problems,
            *self._principal_problems(),
            *self._ratio_problems(),
            *super().problems(training),
        ]

    def _principal_problems(self) -> Iterator[str]:
        init = self.init_lora_weights
        if init is None:
            return
        if not principal.is_known(init):
            yield (
                f"peft.init_lora_weights={init}: use pissa or pissa_niter_16; other ways to start are values of "
                "peft.lora_A_init_method"
            )
        if (self.lora_A_init_method, self.lora_B_init_method) != ("xavier", "zero"):
            yield (
                f"peft.init_lora_weights={init} says how both factors start: leave out peft.lora_A_init_method and "
                "peft.lora_B_init_method"
            )
        if self.base_precision is not None:
            yield (
                f"peft.init_lora_weights={init} takes a part out of the base, which peft.base_precision="
                f"{self.base_precision} would have to quantize without it: leave one of them out"
            )

    def _ratio_problems(self) -> Iterator[str]:
        ratio = self.loraplus_lr_ratio
        if ratio is not None and not (math.isfinite(ratio) and ratio >= 1):
            yield (
                f"peft.loraplus_lr_ratio={ratio}: B learns at least as fast as A: set it to 1 or above, such as 16"
            )

    def prepare(self, chunks: Sequence[nn.Module]) -> None:
        """Choose the layers of this rank.

        Raises:
            UserError: a pattern matches nothing.
        """
        _refuse_other_dtype(chunks, self.lora_dtype)
        modules = HFModules(chunks[0].config)
        candidates = [
            candidate
            for chunk in chunks
            for site in targets.sites(chunk)
            for candidate in self.candidates(site, modules)
        ]
        everywhere = targets.gather(candidates)
        patterns = self.target_patterns(everywhere)
        chosen = targets.choose(everywhere, patterns, self.exclude_modules)
        self._refuse_parts(chosen)
        self._chosen = {candidate.name: candidate for candidate in chosen}
        for key in ("dim_by_module", "alpha_by_module"):
            selected = targets.select(f"peft.{key}", getattr(self, key), chosen)
            self._selected_by.update(selected)

    def target_patterns(self, candidates: Sequence[TargetCandidate]) -> list[str]:
        """Return the patterns that select layers among the ``candidates`` of the whole model."""
        del candidates
        return self.target_modules

    def candidates(self, site: Site, modules: HFModules) -> list[TargetCandidate]:
        """Return what can be adapted in a layer: the layer, and the parts that Hugging Face has as modules."""
        # a decoder's names may also be those of layers of a vision tower, which are not meant
        of_roles = {} if site.name.startswith(targets.TOWER) else modules.of_layer(site.name)
        if self.parts_have_names and (parts := parts_of(site)):
            return [
                TargetCandidate(name, site.name, of_roles.get(role, ()))
                for role, name in parts.items()
            ]
        is_linear = not isinstance(site.module, Router) and targets.is_hidden(site.name)
        layer = TargetCandidate(site.name, site.name, of_roles.pop(None, ()), is_linear=is_linear)
        if not of_roles:
            return [layer]
        known = parts_of(site)
        parts = [
            TargetCandidate(
                known.get(str(role), f"{site.name}:{role}"),
                site.name,
                hf_names,
                is_part=True,
                is_linear=is_linear,
                can_be_apart=role in known,
            )
            for role, hf_names in of_roles.items()
        ]
        return [replace(layer, is_linear=False), *parts]

    def _refuse_parts(self, chosen: Sequence[TargetCandidate]) -> None:
        """Refuse parts of a fused layer that have no separate factors here."""
        names = {candidate.name for candidate in chosen}
        for candidate in chosen:
            if not candidate.is_part:
                continue
            leaf = candidate.layer.rpartition(".")[2]
            hf_name = candidate.hf_names[0].rpartition(".")[2] if candidate.hf_names else leaf
            if candidate.layer in names:
                raise UserError(
                    f"peft.target_modules names {leaf} and its part {hf_name}, which would be adapted twice: "
                    "leave one out"
                )
            if not (self.adapts_parts and candidate.can_be_apart):
                raise UserError(
                    f"peft.target_modules: {hf_name} is a part of {leaf}, to which {type(self).__name__} adds one "
                    f"adapter, so its numbers would not be those of the peft library: name {leaf}, which adapts "
                    "all its parts" + ("" if self.adapts_parts else ", or use peft=LoRA")
                )

    def notes(self) -> list[str]:
        """Return what Hugging Face's names stand for in the model, one sentence each; for after ``prepare``."""
        hf_names_of: dict[str, set[str]] = {}
        for candidate in self._chosen.values():
            if candidate.is_part and candidate.hf_names:
                leaf = candidate.layer.rpartition(".")[2]
                hf_name = candidate.hf_names[0].rpartition(".")[2]
                hf_names_of.setdefault(leaf, set()).add(hf_name)
        return [
            f"peft.target_modules: {', '.join(sorted(hf_names))} of {leaf} have separate factors, as in the "
            f"peft library; the name {leaf} stands for one adapter of the fused layer"
            for leaf, hf_names in hf_names_of.items()
        ]

    def adapt(self, site: Site) -> None:
        """Give a chosen layer its adapter."""
        if any(candidate.layer == site.name for candidate in self._chosen.values()):
            targets.check(site)
            layers.attach(site, self.adapter_for(site))

    @property
    def trained_in_place(self) -> str:
        """The setting that trains weights of the base model; empty if only adapters are trained."""
        return f"peft.modules_to_save={self.modules_to_save}" if self.modules_to_save else ""

    @contextmanager
    def disable_adapter(self, model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
        """Compute the outputs of the base model, without adapters, inside the context.

        Args:
            model: A chunk or all chunks of this rank, adapted, wrapped or not.

        Raises:
            UserError: ``modules_to_save`` were trained, so the base is not there any more.
        """
        if trained := self.trained_in_place:
            raise UserError(
                f"{trained} trains weights of the base model in place, so that it cannot be recovered from this "
                "model: load it as a second model"
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

    def adapter_for(self, site: Site) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} must define adapter_for")

    def shape_for(self, name: str) -> LoRAShape:
        """Rank and scaling of the layer, or part, ``name``."""
        return LoRAShape(
            rank=self._value_for(name, self.dim, self.dim_by_module),
            alpha=self._value_for(name, self.alpha, self.alpha_by_module),
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            dropout_position=self.dropout_position,
            init_a=self.lora_A_init_method,
            init_b=self.lora_B_init_method,
            seed=self.seed or 0,
            principal=self.init_lora_weights,
            is_filled_later=self._is_filled_later,
        )

    def _value_for[T](self, name: str, default: T, by_module: Mapping[str, T]) -> T:
        """Return the value of the first pattern that selects ``name``."""
        values = (value for key, value in by_module.items() if name in self._selected_by[key])
        return next(values, default)


def _refuse_other_dtype(chunks: Sequence[nn.Module], asked: torch.dtype | None) -> None:
    dtype = getattr(chunks[0].config, "params_dtype", None)
    if asked is not None and dtype is not None and asked != dtype:
        raise UserError(
            f"peft.lora_dtype={dtype_name(asked)}: adapters have the model's dtype, {dtype_name(dtype)}; leave it out"
        )


@dataclass
class SplitLoRA(LowRankPEFT):
    """LoRA that can adapt parts of a fused layer, each with separate factors."""

    adapts_parts: ClassVar[bool] = True

    def adapter_for(self, site: Site) -> nn.Module:
        """Return one pair of factors for the layer, or for each chosen part of it."""
        if site.name in self._chosen:
            return LoRAAdapter(site, self.shape_for(site.name))
        parts = parts_of(site)
        if "q" in parts:
            check_queries(site)
        shapes = {
            role: self.shape_for(name) for role, name in parts.items() if name in self._chosen
        }
        return CanonicalAdapter(site, shapes)


@dataclass
class LoRA(SplitLoRA):
    """One low-rank path for each targeted layer.

    A fused layer that is named as Megatron names it (``linear_qkv``) has one path for all its outputs. Its parts can
    be named as Hugging Face names them (``q_proj``), and then have a path each, as in the peft library.

    Example:
        >>> LoRA(target_modules=["linear_qkv"], dim=8, alpha=16).dim
        8
        >>> LoRA(target_modules=["q_proj", "v_proj"]).target_modules
        ['q_proj', 'v_proj']
    """


@dataclass
class VLMLoRA(LoRA):
    """LoRA that can train all weights of the vision tower, or of its projector, next to the adapters.

    Example:
        >>> VLMLoRA(target_modules=["linear_qkv"], freeze_vision_projection=False).freeze_vision_model
        True
    """

    freeze_vision_model: bool = True
    """Leave the tower as it is, except for adapters."""
    freeze_vision_projection: bool = True
    """Leave what lies between tower and decoder as it is, except for adapters."""
    freeze_language_model: bool = True
    """Only True: the decoder gets adapters."""

    def problems(self, training: bool = True) -> list[str]:
        problems = super().problems(training)
        if not self.freeze_language_model:
            problems.append(
                "peft.freeze_language_model=False would train the decoder and adapters on it: set it to True, or "
                "train all weights without peft"
            )
        return problems

    @property
    def trained_in_place(self) -> str:
        for name in ("freeze_vision_model", "freeze_vision_projection"):
            if not getattr(self, name):
                return f"peft.{name}=False"
        return super().trained_in_place

    def _modules_to_save(self, chunks: Sequence[nn.Module]) -> list[nn.Module]:
        """Add the parameters of the tower and its projector that are trained."""
        is_frozen = {
            vision_provider.LANGUAGE_MODEL: True,
            vision_provider.VISION_MODEL: self.freeze_vision_model,
            vision_provider.VISION_PROJECTION: self.freeze_vision_projection,
        }
        trained = [
            parameter
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and not is_frozen[vision_provider.part_of_model(name)]
        ]
        full_modules = super()._modules_to_save(chunks)
        return [*full_modules, nn.ParameterList(trained)] if trained else full_modules


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
                    if isinstance(weight, LowBitWeight):  # rounding would lose most of the adapter
                        low_bit_base.replace_with_full(module, weight, value)
                    else:
                        weight.copy_(value)
                layers.detach(module)
            info = chunk_info(chunk)
            info.peft = None
            info.trained = frozenset()
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
    lost = 0.0
    effect = 0.0
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
            if module.adapter.scales_outputs:
                raise UserError(
                    "DoRA cannot be taken out of a merged model, as the lengths of the base's rows are "
                    "lost: go back to the base itself"
                )
            module.adapter.negate()
