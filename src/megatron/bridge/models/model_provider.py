# SPDX-License-Identifier: Apache-2.0
"""From a lazily configured provider to model chunks that are placed on this rank.

A provider is a dataclass of what the user declared; nothing is derived from its values before the model is built,
so every field, parallel sizes too, can be set until then. ``resolved`` makes the copy in which Megatron-Core
derives the rest; the declared values stay as they were, and that is what is written to a checkpoint.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    distributed_data_parallel,
)
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from megatron.bridge.backends import layer_specs, megatron_fsdp, torch_fsdp2
from megatron.bridge.utils import dist
from megatron.bridge.utils.errors import UserError

logger = logging.getLogger(__name__)

ModelHook = Callable[[list[MegatronModule]], list[MegatronModule] | None]

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


class ModelProvider(TransformerConfig):
    """What every provider can do; a family of models adds its fields and ``provide``."""

    backend: str
    """Layer implementation: ``torch``, ``transformer_engine``, or ``auto`` for the best available."""

    def __post_init__(self) -> None:
        """Nothing yet: Megatron-Core's derivations run in ``resolved``, when the values are final."""

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> MegatronModule:
        """Build the chunk of one (virtual) pipeline stage."""
        raise TypeError(f"{type(self).__name__} is abstract: use a provider of a model family")

    def finalize(self) -> None:
        """Check that the values fit together and change nothing.

        Raises:
            UserError: Megatron-Core refuses the values.
        """
        self.resolved()

    def resolved(self) -> Self:
        """A copy in which dtypes follow the precision flags and Megatron-Core's derived values are filled in."""
        if self.is_resolved:
            return self
        config = copy.copy(self)
        config.derive()
        if config.backend == "torch":
            _report(config, layer_specs.apply_cpu_settings(config))
        try:
            super(ModelProvider, config).__post_init__()  # that of the Megatron config behind the provider
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"Megatron-Core refuses the model's config: {error}") from error
        config.__dict__["_declared"] = self
        return config

    def derive(self) -> None:
        """Fill in, on the copy that ``resolved`` makes, what Megatron-Core does not derive itself."""
        self.backend = layer_specs.resolve_backend(self.backend)
        if self.bf16 or self.fp16:
            self.params_dtype = torch.bfloat16 if self.bf16 else torch.float16
        self.pipeline_dtype = self.params_dtype

    @property
    def is_resolved(self) -> bool:
        """Whether this is the copy that a model was built from."""
        return "_declared" in self.__dict__

    @property
    def declared(self) -> Self:
        """The provider as the user declared it, also when asked of the copy that a model was built from."""
        return self.__dict__.get("_declared", self)

    def register_pre_wrap_hook(self, hook: ModelHook, prepend: bool = False) -> None:
        """Call ``hook(chunks)`` on the bare model, before precision and data-parallel wrappers.

        A hook changes the chunks in place, or returns the chunks to go on with.
        """
        _add_hook(self._hooks("pre_wrap"), hook, prepend)

    def register_post_wrap_hook(self, hook: ModelHook, prepend: bool = False) -> None:
        """Call ``hook(chunks)`` on the wrapped model."""
        _add_hook(self._hooks("post_wrap"), hook, prepend)

    def initialize_model_parallel(
        self, seed: int | None = None, seed_kwargs: dict[str, Any] | None = None, **groups: Any
    ) -> None:
        """Create Megatron's process groups from the parallel sizes, and the default group if there is none.

        Args:
            seed: when given, seeds the random number generators of model parallelism (``RNGConfig.seed``).
            seed_kwargs: passed on to ``model_parallel_cuda_manual_seed``.
            **groups: passed on to ``parallel_state.initialize_model_parallel``.
        """
        dist.initialize()
        sizes = {name: getattr(self, name) for name in PARALLEL_SIZES}
        parallel_state.initialize_model_parallel(**sizes, **groups)
        if seed is not None:
            torch.manual_seed(seed)
            tensor_parallel.model_parallel_cuda_manual_seed(seed, **(seed_kwargs or {}))

    def provide_distributed_model(  # the keyword names are public
        self,
        ddp_config: DistributedDataParallelConfig | None = None,
        wrap_with_ddp: bool = True,
        fp16: bool | None = None,
        bf16: bool | None = None,
        use_cpu_initialization: bool | None = None,
        pre_wrap_hook: ModelHook | None = None,
        post_wrap_hook: ModelHook | None = None,
        data_parallel_random_init: bool = False,
        overlap_param_gather_with_optimizer_step: bool = False,
        use_torch_fsdp2: bool = False,
    ) -> list[MegatronModule]:
        """Build this rank's chunks, one per virtual pipeline stage, on their device and wrapped for training.

        Process groups are initialised with seed 0 if nobody has done so.

        Args:
            ddp_config: data-parallel settings; Megatron-Core's defaults when None.
            wrap_with_ddp: wrap for training; False leaves the bare (or half-precision) model.
            fp16: overrides the provider's flag.
            bf16: overrides the provider's flag; the model is in float32 if one is False and the other not True.
            use_cpu_initialization: overrides the provider's flag.
            pre_wrap_hook: one more hook, called after the registered ones.
            post_wrap_hook: one more hook, called after the registered ones.
            data_parallel_random_init: let ranks initialise differently, then broadcast from the first.
            overlap_param_gather_with_optimizer_step: disables bucketing on later chunks, as Megatron-Core asks.
            use_torch_fsdp2: wrap with PyTorch's fully sharded data parallelism instead of Megatron-Core's own.

        Returns:
            Model chunks of this rank, first virtual stage first.
        """
        overrides = {"fp16": fp16, "bf16": bf16, "use_cpu_initialization": use_cpu_initialization}
        for name, value in overrides.items():
            if value is not None:
                setattr(self, name, value)
        if False in (fp16, bf16) and not (self.fp16 or self.bf16):
            self.params_dtype = torch.float32
        if not parallel_state.model_parallel_is_initialized():
            self.initialize_model_parallel(seed=0)
        config = self.resolved()
        hooks = [*self._hooks("pre_wrap"), pre_wrap_hook]
        if any(getattr(hook, "fills_every_parameter", False) for hook in hooks):
            config.perform_initialization = False  # not on ``self``: what is declared is reused without the hook
        chunks = _run_hooks(hooks, config.build_chunks())
        chunks = _place(chunks, config)
        if wrap_with_ddp:
            ddp = ddp_config or DistributedDataParallelConfig()
            sharded = _kind_of_sharding(ddp, use_torch_fsdp2)
            if sharded is not None:
                chunks = [sharded(config, ddp, chunk) for chunk in chunks]
            else:
                chunks = _wrap_data_parallel(chunks, config, ddp, overlap_param_gather_with_optimizer_step)
                if data_parallel_random_init:
                    _broadcast(chunks)
        return _run_hooks([*self._hooks("post_wrap"), post_wrap_hook], chunks)

    def build_chunks(self) -> list[MegatronModule]:
        """The bare chunks of this rank, sharing one resolved config."""
        config = self.resolved()
        stages = config.virtual_pipeline_model_parallel_size
        chunks = [config.provide(vp_stage=stage) for stage in (range(stages) if stages else (None,))]
        for chunk in chunks:
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return chunks

    def meta_model(self) -> list[MegatronModule]:
        """The bare chunks of this rank on the meta device: names and shapes without memory."""
        if not parallel_state.model_parallel_is_initialized():
            self.initialize_model_parallel(seed=0)
        # parameters have the same names and shapes under any backend; this one leaves the device to the context
        plain = copy.copy(self.declared)
        plain.backend, plain.use_cpu_initialization = "torch", True
        config = plain.resolved()
        config.perform_initialization = False  # there is nothing to fill, and it took most of the time
        config.__dict__["_declared"] = self.declared
        with torch.device("meta"):
            return config.build_chunks()

    def _hooks(self, kind: str) -> list[ModelHook]:
        # kept beside the fields: hooks are not part of what is declared and never written to a checkpoint
        return self.__dict__.setdefault(f"_{kind}_hooks", [])


def _report(config: ModelProvider, changes: list[layer_specs.Change]) -> None:
    """Say which settings this machine cannot honour; those that nobody asked for are not worth a line."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for change in changes:
        if change.asked != defaults[change.field] and dist.rank() == 0:
            logger.warning(
                "model.%s=%r is %r on this machine: %s", change.field, change.asked, change.used, change.reason
            )


def _add_hook(hooks: list[ModelHook], hook: ModelHook, prepend: bool) -> None:
    hooks.insert(0 if prepend else len(hooks), hook)


def _run_hooks(hooks: list[ModelHook | None], chunks: list[MegatronModule]) -> list[MegatronModule]:
    for hook in hooks:
        if hook is not None:
            chunks = hook(chunks) or chunks
    return chunks


def _place(chunks: list[MegatronModule], config: ModelProvider) -> list[MegatronModule]:
    """Move the chunks to this rank's device, in half precision where asked."""
    for chunk in chunks:
        chunk.cuda(torch.cuda.current_device())  # the identity on a machine without a GPU
    return in_precision(chunks, config)


def in_precision(chunks: list[MegatronModule], config: TransformerConfig) -> list[MegatronModule]:
    """The chunks in half precision where ``config`` asks for it, but for what needs to be exact."""
    if not (config.fp16 or config.bf16):
        return chunks
    # half precision can neither count a router's tokens nor sum up the small steps of its correction bias
    exact = [(module, dict(module.named_buffers(recurse=False))) for chunk in chunks for module in _routers(chunk)]
    halved: list[MegatronModule] = [Float16Module(config, chunk) for chunk in chunks]
    for module, buffers in exact:
        for name, buffer in buffers.items():
            module._buffers[name] = buffer
    return halved


def _routers(chunk: MegatronModule) -> Iterator[Module]:
    return (module for module in chunk.modules() if isinstance(module, Router))


def _kind_of_sharding(
    ddp: DistributedDataParallelConfig, torch_fsdp: bool
) -> Callable[..., MegatronModule] | None:
    """The wrapper that cuts weights over ranks; None if none shall."""
    if torch_fsdp:
        return torch_fsdp2.FullyShardedDataParallel
    return megatron_fsdp.FullyShardedDataParallel if ddp.use_megatron_fsdp else None


def _broadcast(chunks: list[MegatronModule]) -> None:
    for chunk in chunks:
        cast(DistributedDataParallel, chunk).broadcast_params()


def _wrap_data_parallel(
    chunks: list[MegatronModule],
    config: ModelProvider,
    ddp_config: DistributedDataParallelConfig,
    disable_later_buckets: bool,
) -> list[MegatronModule]:
    # it says that the layout of a sharded optimizer's buffers was not given, and computes the same one
    with without_warnings_of(distributed_data_parallel):
        return [
            DistributedDataParallel(
                config=config,
                ddp_config=ddp_config,
                module=chunk,
                # later chunks wait for the first anyway, so one bucket each costs nothing
                disable_bucketing=index > 0 or disable_later_buckets,
            )
            for index, chunk in enumerate(chunks)
        ]


@contextmanager
def without_warnings_of(module: ModuleType) -> Iterator[None]:
    """Silence a module of Megatron-Core while it warns of what is as it should be."""
    source = logging.getLogger(module.__name__)
    level = source.level
    source.setLevel(logging.ERROR)
    try:
        yield
    finally:
        source.setLevel(level)
