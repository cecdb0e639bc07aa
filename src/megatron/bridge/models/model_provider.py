# SPDX-License-Identifier: Apache-2.0
"""The base class of providers, which build this rank's model chunks from a lazily resolved config.

A provider is a dataclass of the values that the user declared. Nothing is derived from them before the model is built,
so every field, including parallel sizes, can be set until then. ``resolved`` makes a copy in which Megatron-Core
derives the rest; the declared values do not change, and are what a checkpoint stores.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Self, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    distributed_data_parallel,
)
from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.fsdp import megatron_fsdp, torch_fsdp2
from megatron.bridge.backends.kernels import eager
from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.models.core_ranges import TRANSFORMER_RANGES
from megatron.bridge.utils import distributed
from megatron.bridge.utils.config.ranges import Range, out_of_range
from megatron.bridge.utils.errors import UserError, did_you_mean, refuse

logger = logging.getLogger(__name__)

ModelHook = Callable[[list[MegatronModule]], list[MegatronModule] | None]
"""Changes the chunks of a new model in place, or returns the chunks to use instead."""

HalfPrecisionWrapper = Callable[[TransformerConfig, MegatronModule], MegatronModule]
"""Wraps a chunk that computes in fp16 or bf16, as Megatron-Core's ``Float16Module`` does."""

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)

_OWN_GROUPS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
}

EVEN_STAGES: dict[str, Any] = {
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Fields that divide layers unevenly among pipeline stages, with the values that do not."""


@dataclass(frozen=True)
class PreWrapHook:
    """A hook for the bare chunks of a new model that can guarantee to set every parameter."""

    function: ModelHook
    fills_every_parameter: bool = False
    """The function sets every parameter, so the model is built without initializing them."""

    def __call__(self, chunks: list[MegatronModule]) -> list[MegatronModule] | None:
        return self.function(chunks)

    def then(self, function: ModelHook) -> "PreWrapHook":
        """This hook followed by ``function``, with the same guarantee."""
        return replace(self, function=lambda chunks: run_hooks((self, function), chunks))


@dataclass
class ModelProvider(TransformerConfig):
    """The base class of providers; a family of models adds its fields and ``provide``."""

    INHERITED_RANGES: ClassVar[dict[str, Range]] = TRANSFORMER_RANGES

    backend: str = "auto"
    """Layer implementation: ``torch``, ``transformer_engine``, or ``auto`` for the best available."""
    deallocate_pipeline_outputs: bool = True
    """Free the output of a pipeline stage after it has been sent; the backward pass does not read it."""
    hf_config: Any = field(default=None, init=False, repr=False, compare=False)
    """The Hugging Face config that a bridge made this provider from; None for other providers."""
    # neither declared nor written to a file
    _declared: Self | None = field(default=None, init=False, repr=False, compare=False)
    _pre_wrap_hooks: list[ModelHook] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _post_wrap_hooks: list[ModelHook] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Do nothing: Megatron-Core's derivations run in ``resolved``, when the values are final."""

    def provide(
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> MegatronModule:
        """Build the chunk of one (virtual) pipeline stage."""
        raise TypeError(f"{type(self).__name__} is abstract: use a provider of a model family")

    @property
    def expert_tensor_ranks(self) -> int:
        """Tensor-parallel ranks of each expert.

        By default, the same number as for other layers, but experts with biases cannot be sharded.
        """
        default = 1 if self._has_expert_biases else self.tensor_model_parallel_size
        return self.expert_tensor_parallel_size or default

    @property
    def _has_expert_biases(self) -> bool:
        return bool(self.num_moe_experts) and self.add_bias_linear

    def finalize(self) -> None:
        """Check that the values fit together and change nothing.

        Raises:
            UserError: Megatron-Core refuses the values.
        """
        self.resolved()

    def apply_overrides_and_finalize(
        self, dtype: torch.dtype | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Self:
        """Set the dtype and attributes, then call ``finalize``.

        Args:
            dtype: of the parameters; sets ``params_dtype``, ``fp16`` and ``bf16``. None leaves them.
            overrides: attributes of the provider, by name.

        Raises:
            UserError: the provider has no such attribute, or Megatron-Core refuses the values; nothing was set.
        """
        values = dict(overrides or {})
        for name in values:
            if not hasattr(self, name):
                known = [field.name for field in fields(self)]
                raise UserError(
                    f"{type(self).__name__} has no attribute {name}{did_you_mean(name, known)}"
                )
        if dtype is not None:
            precision = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
            values = {"params_dtype": dtype, **precision, **values}
        trial = copy.copy(self)
        for provider in (trial, self):
            for name, value in values.items():
                setattr(provider, name, value)
            provider.finalize()
        return self

    def resolved(self) -> Self:
        """A copy in which dtypes follow the precision flags and Megatron-Core's derived values are filled in."""
        if self.is_resolved:
            return self
        refuse_other_groups(getattr(self, "_pg_collection", None))
        refuse(out_of_range(self, skipped=PARALLEL_SIZES))
        config = copy.copy(self)
        config.derive()
        _report_disabled(layer_specs.apply_backend_settings(config, config.backend))
        try:
            super(
                ModelProvider, config
            ).__post_init__()  # that of the Megatron config behind the provider
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"Megatron-Core refuses the model's config: {error}") from error
        config._declared = self
        return config

    def derive(self) -> None:
        """Fill in, on the copy that ``resolved`` makes, what Megatron-Core does not derive itself."""
        self.backend = layer_specs.resolve_backend(self.backend)
        self.expert_tensor_parallel_size = self.expert_tensor_ranks
        if self.bf16 or self.fp16:
            self.params_dtype = torch.bfloat16 if self.bf16 else torch.float16
        self.pipeline_dtype = self.params_dtype

    @property
    def is_resolved(self) -> bool:
        """Whether this is the copy that a model was built from."""
        return self._declared is not None

    @property
    def declared(self) -> Self:
        """The provider as the user declared it, also when asked of the copy that a model was built from."""
        return self if self._declared is None else self._declared

    def register_pre_wrap_hook(self, hook: ModelHook, prepend: bool = False) -> None:
        """Call ``hook(chunks)`` on the bare model, before precision and data-parallel wrappers.

        A hook changes the chunks in place, or returns the chunks to go on with.
        """
        self._pre_wrap_hooks.insert(0 if prepend else len(self._pre_wrap_hooks), hook)

    def register_post_wrap_hook(self, hook: ModelHook, prepend: bool = False) -> None:
        """Call ``hook(chunks)`` on the wrapped model."""
        self._post_wrap_hooks.insert(0 if prepend else len(self._post_wrap_hooks), hook)

    def initialize_model_parallel(
        self, seed: int | None = None, seed_kwargs: dict[str, Any] | None = None, **groups: Any
    ) -> None:
        """Create Megatron's process groups from the parallel sizes, and the default group if there is none.

        Args:
            seed: when given, seeds the random number generators of model parallelism (``RNGConfig.seed``).
            seed_kwargs: passed on to ``model_parallel_cuda_manual_seed``.
            **groups: passed on to ``parallel_state.initialize_model_parallel``.
        """
        distributed.initialize()
        sizes = {name: getattr(self, name) for name in PARALLEL_SIZES}
        sizes["expert_tensor_parallel_size"] = self.expert_tensor_ranks
        parallel_state.initialize_model_parallel(
            **sizes, hybrid_context_parallel=self.hybrid_context_parallel, **groups
        )
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
        pre_wrap_hook: ModelHook | Iterable[ModelHook] | None = None,
        post_wrap_hook: ModelHook | None = None,
        data_parallel_random_init: bool = False,
        overlap_param_gather_with_optimizer_step: bool = False,
        use_torch_fsdp2: bool = False,
        use_megatron_fsdp: bool | None = None,
        mixed_precision_wrapper: HalfPrecisionWrapper | None = Float16Module,
        pg_collection: ProcessGroupCollection | None = None,
        init_model_with_meta_device: bool | None = None,
        model_type: ModelType = ModelType.encoder_or_decoder,
    ) -> list[MegatronModule]:
        """This rank's chunks, first virtual stage first, on their device and wrapped for training.

        Process groups are initialized with seed 0 if there are none yet.

        Args:
            ddp_config: data-parallel settings; Megatron-Core's defaults when None.
            wrap_with_ddp: wrap for training; False leaves the bare (or half-precision) model.
            fp16: overrides the provider's flag.
            bf16: overrides the provider's flag; the model is in float32 if one is False and the other not True.
            use_cpu_initialization: overrides the provider's flag.
            pre_wrap_hook: one more hook, or several, called after the registered ones.
            post_wrap_hook: one more hook, called after the registered ones.
            data_parallel_random_init: let ranks initialize differently, then broadcast from the first.
            overlap_param_gather_with_optimizer_step: disables bucketing on later chunks, as Megatron-Core asks.
            use_torch_fsdp2: wrap with PyTorch's fully sharded data parallelism instead of Megatron-Core's own.
            use_megatron_fsdp: wrap with Megatron-FSDP; ``ddp_config.use_megatron_fsdp`` when None.
            mixed_precision_wrapper: called with (config, chunk) in fp16 or bf16; None leaves the chunks bare.
            pg_collection: Megatron-Core's own groups; others are refused.
            init_model_with_meta_device: True is refused; ``meta_model`` builds without memory.
            model_type: only ``encoder_or_decoder``.

        Raises:
            UserError: values that are not supported or contradict each other.
        """
        _refuse_unsupported(init_model_with_meta_device, model_type)
        self._set_flags(fp16, bf16, use_cpu_initialization)
        self._ensure_groups()
        refuse_other_groups(pg_collection)
        config = self.resolved()
        if not wrap_with_ddp:
            config.cuda_graph_impl = "none"  # of training steps
        chunks = self._filled_chunks(config, pre_wrap_hook)
        # FSDP2 moves one unit at a time, so a model that was built on the host never needs to fit on one GPU
        if not (wrap_with_ddp and use_torch_fsdp2 and config.use_cpu_initialization):
            for chunk in chunks:
                chunk.cuda(torch.cuda.current_device())  # does nothing on a machine without a GPU
        chunks = to_half_precision(chunks, config, mixed_precision_wrapper)
        if wrap_with_ddp:
            ddp = _with_megatron_fsdp(
                ddp_config or DistributedDataParallelConfig(), use_megatron_fsdp
            )
            flags = (
                use_torch_fsdp2,
                overlap_param_gather_with_optimizer_step,
                data_parallel_random_init,
            )
            chunks = _wrap_data_parallel(chunks, config, ddp, *flags)
        return run_hooks([*self._post_wrap_hooks, post_wrap_hook], chunks)

    def _ensure_groups(self) -> None:
        if not parallel_state.model_parallel_is_initialized():
            self.initialize_model_parallel(seed=0)

    def _filled_chunks(
        self, config: Self, given: ModelHook | Iterable[ModelHook] | None
    ) -> list[MegatronModule]:
        """The bare chunks after the registered and the ``given`` pre-wrap hooks."""
        hooks = [*self._pre_wrap_hooks, *([given] if given is None or callable(given) else given)]
        if any(isinstance(hook, PreWrapHook) and hook.fills_every_parameter for hook in hooks):
            config.perform_initialization = (
                False  # not on ``self``, which is reused without the hook
            )
        return run_hooks(hooks, config.build_chunks())

    def _set_flags(
        self, fp16: bool | None, bf16: bool | None, use_cpu_initialization: bool | None
    ) -> None:
        flags = {"fp16": fp16, "bf16": bf16, "use_cpu_initialization": use_cpu_initialization}
        for name, value in flags.items():
            if value is not None:
                setattr(self, name, value)
        if False in (fp16, bf16) and not (self.fp16 or self.bf16):
            self.params_dtype = torch.float32

    def build_chunks(self) -> list[MegatronModule]:
        """The bare chunks of this rank, sharing one resolved config."""
        config = self.resolved()
        _check_layout(config)
        stages = config.virtual_pipeline_model_parallel_size
        chunks = [
            config.provide(vp_stage=stage) for stage in (range(stages) if stages else (None,))
        ]
        for chunk in chunks:
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return chunks

    def meta_model(self) -> list[MegatronModule]:
        """The bare chunks of this rank on the meta device: names and shapes without memory."""
        self._ensure_groups()
        # parameters have the same names and shapes under any backend; this one leaves the device to the context
        plain = copy.copy(self.declared)
        plain.backend = "torch"
        plain.use_cpu_initialization = True
        plain.cuda_graph_impl = "none"
        config = plain.resolved()
        config.perform_initialization = False  # there are no values, and it took most of the time
        config._declared = self.declared
        with torch.device("meta"):
            return config.build_chunks()


ModelProviderMixin = ModelProvider


def get_model(
    model_provider: ModelProvider,
    ddp_config: DistributedDataParallelConfig,
    model_type: ModelType = ModelType.encoder_or_decoder,
    **options: Any,
) -> list[MegatronModule]:
    """``provide_distributed_model`` without the hooks that are registered: only those given are called."""
    bare = copy.copy(model_provider)
    bare._pre_wrap_hooks = []
    bare._post_wrap_hooks = []
    # another copy, because Megatron-Core writes the bucket size into the config
    return bare.provide_distributed_model(copy.copy(ddp_config), model_type=model_type, **options)


def _check_layout(config: Any) -> None:
    """Refuse parallel sizes that do not divide what they shard; Megatron-Core's assertions mostly name no setting."""
    tensor = "tensor_model_parallel_size"
    frequency = config.moe_layer_freq
    cuts = {"num_moe_experts": "expert_model_parallel_size"}
    if config.num_moe_experts:
        cuts |= {
            "moe_shared_expert_intermediate_size": tensor,
            "moe_ffn_hidden_size": "expert_tensor_parallel_size",
        }
    if not config.num_moe_experts or (isinstance(frequency, list) and 0 in frequency):
        cuts["ffn_hidden_size"] = tensor
    sizes = {
        (part, dimension): (getattr(config, part) or 1, getattr(config, dimension) or 0)
        for dimension, part in cuts.items()
    }
    even = all(getattr(config, name) == value for name, value in EVEN_STAGES.items())
    if even and not hasattr(config, "has_own_stages"):
        stages = config.pipeline_model_parallel_size * (
            config.virtual_pipeline_model_parallel_size or 1
        )
        sizes["pipeline_model_parallel_size", "num_layers"] = stages, config.num_layers
    for (part, dimension), (parts, size) in sizes.items():
        if size % parts:
            raise UserError(
                f"{part}={parts} does not divide {dimension}={size}: choose a size that does"
            )


def refuse_other_groups(groups: Any) -> None:
    """Refuse a ``ProcessGroupCollection`` whose groups differ from those of ``parallel_state``."""
    if groups is None or not parallel_state.model_parallel_is_initialized():
        return
    for name, own_group in _OWN_GROUPS.items():
        given_group = getattr(groups, name, None)
        if given_group is not None and given_group is not own_group():
            raise UserError(
                f"pg_collection.{name} differs from the group of megatron.core.parallel_state, on which models are "
                "built: remove pg_collection, or use ProcessGroupCollection.use_mpu_process_groups()"
            )


def _report_disabled(changes: list[layer_specs.DisabledSetting]) -> None:
    for change in changes if distributed.rank() == 0 else ():
        _warn_once(
            f"model.{change.field}={change.asked!r} is {change.used!r} on this machine: {change.reason}"
        )


@cache
def _warn_once(message: str) -> None:
    """Log a warning, once for all chunks and copies of a model."""
    logger.warning("%s", message)


def run_hooks(
    hooks: Iterable[ModelHook | None], chunks: list[MegatronModule]
) -> list[MegatronModule]:
    for hook in hooks:
        if hook is not None:
            chunks = hook(chunks) or chunks
    return chunks


def _refuse_unsupported(meta_device: bool | None, model_type: ModelType) -> None:
    if meta_device:
        raise UserError(
            "init_model_with_meta_device=True leaves parameters without values: remove it, or call meta_model()"
        )
    if model_type != ModelType.encoder_or_decoder:
        raise UserError(
            f"model_type={model_type} is not supported: use ModelType.encoder_or_decoder"
        )


def _with_megatron_fsdp(
    ddp: DistributedDataParallelConfig, asked: bool | None
) -> DistributedDataParallelConfig:
    """``ddp`` with ``use_megatron_fsdp`` as the caller asked for it."""
    if asked is None or asked == bool(ddp.use_megatron_fsdp):
        return ddp
    if not asked:
        raise UserError(
            "use_megatron_fsdp=False contradicts ddp_config.use_megatron_fsdp=True: set both to the same value"
        )
    return replace(ddp, use_megatron_fsdp=True)


def to_half_precision(
    chunks: list[MegatronModule],
    config: TransformerConfig,
    wrapper: HalfPrecisionWrapper | None = Float16Module,
) -> list[MegatronModule]:
    """The chunks in half precision if ``config`` sets it, except buffers that must be exact."""
    if not (config.fp16 or config.bf16):
        return chunks
    # half precision cannot count a router's tokens or accumulate the small steps of its correction bias, and the
    # rotary angles of a vision tower would be off by a tenth of a radian
    exact = [
        (module, dict(module.named_buffers(recurse=False)))
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Router) or getattr(module, "keeps_buffers_exact", False)
    ]
    wrapper = wrapper or (lambda _, chunk: chunk.half() if config.fp16 else chunk.bfloat16())
    halved = [wrapper(config, chunk) for chunk in chunks]
    for module, buffers in exact:
        for name, buffer in buffers.items():
            module._buffers[name] = buffer
    return halved


def _wrap_data_parallel(
    chunks: list[MegatronModule],
    config: ModelProvider,
    ddp_config: DistributedDataParallelConfig,
    torch_fsdp: bool,
    disable_later_buckets: bool,
    broadcast: bool,
) -> list[MegatronModule]:
    if torch_fsdp:
        return [torch_fsdp2.TorchFSDP2Wrapper(config, ddp_config, chunk) for chunk in chunks]
    if ddp_config.use_megatron_fsdp:
        return [megatron_fsdp.MegatronFSDPWrapper(config, ddp_config, chunk) for chunk in chunks]
    # it warns that the layout of a sharded optimizer's buffers was not given, and computes the same one
    with silenced(distributed_data_parallel), _stream_of_capture(config):
        wrapped = [
            DistributedDataParallel(
                config=config,
                ddp_config=ddp_config,
                module=chunk,
                # later chunks wait for the first anyway, so one bucket each costs nothing
                disable_bucketing=index > 0 or disable_later_buckets,
            )
            for index, chunk in enumerate(chunks)
        ]
    for chunk in wrapped:
        eager.accumulate_by_parts(chunk)
        if broadcast:
            chunk.broadcast_params()
    return cast(list[MegatronModule], wrapped)


@contextmanager
def _stream_of_capture(config: ModelProvider) -> Iterator[None]:
    """Make autograd first use parameters on the stream of CUDA graphs: a captured backward pass waits for no other."""
    if config.cuda_graph_impl != "full_iteration":
        yield
        return
    stream = get_shared_capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def silenced(module: ModuleType) -> Iterator[None]:
    """Silence unfounded warnings of a module of Megatron-Core inside the context."""
    source = logging.getLogger(module.__name__)
    level = source.level
    source.setLevel(logging.ERROR)
    try:
        yield
    finally:
        source.setLevel(level)
