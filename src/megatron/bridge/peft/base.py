# SPDX-License-Identifier: Apache-2.0
"""The base of all methods of parameter-efficient fine-tuning: freeze the model, add parameters, track them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from megatron.bridge.backends.low_bit.formats import FORMATS, BasePrecision
from megatron.bridge.checkpoint import model_io
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import in_adapter, mark_whole
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.plan import global_name
from megatron.bridge.peft import low_bit_base, targets
from megatron.bridge.peft.hf_names import HFModules
from megatron.bridge.peft.targets import Site, TargetCandidate
from megatron.bridge.utils.errors import UserError

_TIED = ("embedding.word_embeddings", "output_layer")


@dataclass
class PEFT:
    """A method of parameter-efficient fine-tuning; subclasses define ``transform``, or ``adapt``.

    Whatever they add is trained, as are ``modules_to_save``; everything else is frozen.

    Example:
        A user's own method::

            @dataclass
            class TrainNorms(PEFT):
                def transform(self, module, name="", prefix=""):
                    if name == "input_layernorm":
                        module.requires_grad_(True)
                    return module
    """

    __one_of_several__: ClassVar[bool] = True  # a method is chosen by name, not by setting a member

    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train fully and save with the adapters, by name or pattern."""
    seed: int | None = None
    """Seed of the adapters' first values; None is ``rng.seed`` of a run, and 0 outside of one."""
    base_precision: BasePrecision | None = None
    """Hold the frozen matrices of attention, MLPs and experts in 4 or 8 bits (QLoRA): ``nf4`` as bitsandbytes,
    ``fp8``, ``mxfp4``. None holds them in the model's precision."""
    base_keep_high: list[str] = field(default_factory=list)
    """Layers that stay in the model's precision, in the form of ``modules_to_save``."""

    def problems(self, training: bool = True) -> list[str]:
        """One sentence for each invalid value.

        Args:
            training: whether what is added will be trained.
        """
        del training
        if self.base_precision is not None and self.base_precision not in FORMATS:
            return [
                f"peft.base_precision={self.base_precision} is not one of {', '.join(FORMATS)}: use one of them (nf4 "
                "is load_in_4bit of transformers)"
            ]
        if self.base_keep_high and self.base_precision is None:
            return ["peft.base_keep_high has no effect without peft.base_precision: leave it out"]
        return []

    def notes(self) -> list[str]:
        """Return sentences about what was added, for the log of a run; ``__call__`` comes first."""
        return []

    def prepare(self, chunks: Sequence[nn.Module]) -> None:
        """Inspect the whole model before anything is changed; all ranks of a replica call this together."""

    def transform(self, module: nn.Module, name: str = "", prefix: str = "") -> nn.Module:
        """The module to use in place of ``module``: the module itself, changed or not, or another one.

        Args:
            module: Any module of the model; its parameters are frozen.
            name: Its name in its parent.
            prefix: The parent's name in the whole model.
        """
        return module

    def adapt(self, site: Site) -> None:
        """Change a linear layer in place; called for each one, in the order of the model."""

    def __call__(self, model: nn.Module | list[nn.Module], training: bool = True) -> Any:
        """Freeze the model and add what is trained.

        Args:
            model: A chunk or all chunks of this rank, with its base weights, before data parallelism wraps it.
            training: Whether to train what was added; False freezes it, too.

        Returns:
            The same model.
        """
        chunks = bare_chunks(model)
        if problems := self.problems(training):
            raise UserError("\n".join(problems))
        if any(chunk_info(chunk).peft is not None for chunk in chunks):
            raise UserError(
                "this model has adapters already: merge them with LoRAMerge, or build it again"
            )
        self.prepare(chunks)
        full_modules = self._modules_to_save(chunks)
        self.lower_base(chunks)
        for chunk in chunks:
            chunk.requires_grad_(False)
            for site in list(targets.sites(chunk)):
                self.adapt(site)
            _transform_children(chunk, chunk, "", self.transform)
        for module in full_modules:
            for parameter in module.parameters():
                parameter.requires_grad_(True)
                mark_whole(parameter)
        self._refuse_nothing(chunks)
        _refuse_trained_low_bit(chunks)
        for chunk in chunks:
            info = chunk_info(chunk)
            info.peft = self
            # frozen parameters of an adapter are not in the base, so they are saved, too
            info.trained = frozenset(
                name
                for name, parameter in chunk.named_parameters()
                if parameter.requires_grad or in_adapter(name)
            )
            let_gradients_start(chunk)
            if not training:
                chunk.requires_grad_(False)
        return model

    def lower_base(self, chunks: Sequence[nn.Module], is_loaded: bool = True) -> None:
        """Hold the base in ``base_precision``, except ``modules_to_save``; all ranks of a replica call this.

        Args:
            chunks: All chunks of this rank, bare and without adapters.
            is_loaded: Whether the chunks have the values of the base; else they get them later.
        """
        if self.base_precision is None:
            return
        trained = {
            id(parameter)
            for module in self._modules_to_save(chunks)
            for parameter in module.parameters()
        }
        keep_high = self.base_keep_high
        low_bit_base.set_precision(chunks, self.base_precision, keep_high, trained, is_loaded)

    def set_params_to_save(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Record the names of the trained parameters, as in the bare chunks, in ``params_to_save``.

        Args:
            model: A chunk or all chunks of this rank, adapted.
        """
        names = {name for chunk in bare_chunks(model) for name in chunk_info(chunk).trained}
        vars(self)["params_to_save"] = names

    def adapter_key_filter(self, key: Any) -> bool:
        """Whether an entry of a chunk's state dict is trained.

        Args:
            key: The entry's name; or (name, parameter).
        """
        if isinstance(key, tuple):
            return bool(key[1].requires_grad)
        return in_adapter(key) or key in vars(self).get("params_to_save", ())

    def _modules_to_save(self, chunks: Sequence[nn.Module]) -> list[nn.Module]:
        named = [
            (global_name(chunk, f"{path}.").removesuffix("."), module)
            for chunk in chunks
            for path, module in chunk.named_modules()
            if path and next(module.parameters(), None) is not None
        ]
        if not self.modules_to_save:
            return []
        modules = HFModules(chunks[0].config)
        candidates = [
            TargetCandidate(name, name, modules.of_layer(name).get(None, ()), is_linear=False)
            for name, _ in named
        ]
        everywhere = targets.gather(candidates)
        selected = targets.select("peft.modules_to_save", self.modules_to_save, everywhere)
        names = {name for group in selected.values() for name in group}
        _refuse_half_of_a_tie(chunks, names)
        return [module for name, module in named if name in names]

    def _refuse_nothing(self, chunks: Sequence[nn.Module]) -> None:
        trained = any(True for chunk in chunks for _ in _trainable_parameters(chunk))
        if not any(exchange.all_gather_stages(trained)):
            raise UserError(
                f"peft: {type(self).__name__} adds nothing to this model that could be trained"
            )


def _refuse_trained_low_bit(chunks: Sequence[nn.Module]) -> None:
    for weight in low_bit_base.low_bit_weights(chunks):
        if weight.requires_grad:
            raise UserError(
                f"a transform of peft trains a weight of shape {list(weight.shape)} that peft.base_precision holds in "
                f"{weight.low_bit_format.name}: leave base_precision out"
            )


def _refuse_half_of_a_tie(chunks: Sequence[nn.Module], modules_to_save: set[str]) -> None:
    """Refuse to train one half of a tie: with pipeline stages the output layer is a copy, which would diverge."""
    config: Any = chunks[0].config
    tied = config.share_embeddings_and_output_weights and config.pipeline_model_parallel_size > 1
    halves = modules_to_save & set(_TIED)
    if tied and len(halves) == 1:
        raise UserError(
            f"peft.modules_to_save has {halves.pop()} and not the other one of {' and '.join(_TIED)}, "
            "which are tied over pipeline stages: name both"
        )


def _trainable_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return (
        (name, parameter) for name, parameter in chunk.named_parameters() if parameter.requires_grad
    )


def _transform_children(
    chunk: nn.Module,
    parent: nn.Module,
    path: str,
    transform: Callable[[nn.Module, str, str], nn.Module],
) -> None:
    prefix = global_name(chunk, f"{path}.").removesuffix(".") if path else ""
    for name, child in list(parent.named_children()):
        _transform_children(chunk, child, f"{path}.{name}" if path else name, transform)
        replacement = transform(child, name, prefix)
        if replacement is not child:
            setattr(parent, name, replacement)


def bare_chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The chunks without wrappers of data parallelism and precision."""
    return [model_io.unwrap(chunk) for chunk in model_io.as_chunks(model)]


def let_gradients_start(chunk: nn.Module) -> None:
    """Make the outputs of a frozen embedding require gradients if a later layer needs them.

    This costs the gradient of the first layer's inputs, which is not used.
    """
    config: Any = getattr(chunk, "config", None)
    embedding = getattr(chunk, "embedding", None)
    if embedding is None or config is None:
        return
    if _ask_for_gradient in embedding._forward_hooks.values():
        return
    if config.recompute_granularity is not None or config.pipeline_model_parallel_size > 1:
        embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_(True)
