# SPDX-License-Identifier: Apache-2.0
"""Make Megatron-Core run on CPU tensors and gloo on a machine without a CUDA device.

Each function below is one patch with its reason. `install` applies those that concern torch, once per process,
before ``megatron.core`` is imported (see `backends.cpu.import_hook`). Functions that take a module patch that
module of Megatron-Core right after its import. Patches are global to the process and are not undone. Nothing is
patched when CUDA is available.
"""

import contextlib
import functools
import logging
import queue
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.jit import _builtins as torch_script_operators

from megatron.bridge.backends.hardware import compiler
from megatron.bridge.utils.patching import patched

_MARK = "__megatron_bridge_cpu__"
_CPU = torch.device("cpu")
_place = [_CPU]


def has_cuda() -> bool:
    return torch.cuda.is_available()


def installed() -> bool:
    """Whether the CPU device layer is active in this process."""
    return hasattr(torch.cuda.current_device, _MARK)


def install() -> None:
    """Apply the device layer, unless CUDA is available or it is installed already."""
    if has_cuda() or installed():
        return
    _keep_device_contexts()
    _patch_current_device()
    _patch_streams()
    _patch_generators()
    _patch_factories()
    _patch_tensor_methods()
    _patch_all_to_all()
    _patch_uneven_collectives()
    _patch_coalescing_manager()
    _patch_optimizers()
    _widen_products()


def _mark_as_patch(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function


def _patch_current_device() -> None:
    """Megatron-Core passes ``torch.cuda.current_device()`` as ``device=`` in about 175 places."""

    @_mark_as_patch
    def current_device() -> torch.device:
        return _place[-1]

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "set_stream"):
        setattr(torch.cuda, name, _no_op())
    torch.cuda.nvtx.range_push = _no_op()
    torch.cuda.nvtx.range_pop = _no_op()


@contextlib.contextmanager
def placed_on(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current device, and what ``device="cuda"`` means, inside the context."""
    _place.append(device)
    try:
        yield
    finally:
        _place.pop()


def _no_op() -> Callable[..., None]:
    """A new function that does nothing; torch.compile fails to load if one function has two names in torch."""

    def no_action(*args: Any, **kwargs: Any) -> None:
        pass

    return no_action


class _Event:
    """A point in time. Work on the CPU is done when its call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end._at - self._at) * 1e3

    def query(self) -> bool:
        return True

    wait = synchronize = _no_op()


class _Stream:
    device = _CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    wait_event = wait_stream = synchronize = _no_op()


def _patch_streams() -> None:
    """Gradient buffers, token dispatchers, pipeline communication and checkpoint writers use streams."""
    only = _Stream()
    torch.cuda.Event = _Event  # type: ignore[assignment, misc]
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: only  # type: ignore[assignment]
    torch.cuda.default_stream = lambda device=None: only  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.record_stream = _no_op()  # type: ignore[assignment]


def _get_rng_state(
    device: object = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _patch_generators() -> None:
    """Megatron-Core saves and restores the GPU generator; dropout draws from the CPU generator here."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    namespaces: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in namespaces:
        module.manual_seed = manual_seed
        module.get_rng_state = _get_rng_state
        module.set_rng_state = _set_rng_state


def patch_rng_tracker(module: Any) -> None:
    """Restore random states immediately, and let the tracker fork the CPU generator.

    Without CUDA, ``_set_cuda_rng_state`` only queues a call until CUDA is initialized: the state is silently never
    restored, and dropout under recomputation draws another mask than in the forward pass. Megatron-Core's tracker
    also treats a change of the CPU generator inside ``fork`` as an error.
    """

    class CpuRNGStatesTracker(module.CudaRNGStatesTracker):
        """Named random states that share the CPU generator."""

        @contextlib.contextmanager
        def fork(self, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if not self.states_:
                _seed_as_torch(module.model_parallel_cuda_manual_seed)
            if name not in self.states_:
                raise KeyError(
                    f"no random state named {name!r}: call torch.manual_seed with the same number on all ranks, "
                    "or megatron.core.tensor_parallel.model_parallel_cuda_manual_seed, first"
                )
            outer_name = self._current_state_name
            outer = torch.get_rng_state()
            if outer_name in self.states_:  # a nested fork may continue it
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(self.states_.get(outer_name, outer))
                self._current_state_name = outer_name

    module._get_cuda_rng_state = _get_rng_state
    module._set_cuda_rng_state = _set_rng_state
    module.CudaRNGStatesTracker = CpuRNGStatesTracker


def _seed_as_torch(seed_trackers: Callable[[int], None]) -> None:
    """Seed the states of model parallelism with the seed that ``torch.manual_seed`` was given, if it was.

    Programs like Megatron-LM's ``_set_random_seed`` seed them only if ``torch.cuda.device_count()`` is not 0.
    A process that was not seeded has a random seed of 64 bits, another one on each rank, which would let
    replicated parameters differ. Seeds that people choose have 32 bits, as numpy's must.
    """
    if torch.initial_seed() >= _RANDOM_SEEDS_FROM:
        return
    state = torch.get_rng_state()
    seed_trackers(torch.initial_seed())
    torch.set_rng_state(state)


_RANDOM_SEEDS_FROM = 2**32

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
)


def _keep_device_contexts() -> None:
    """Let torch list its own factories before they are wrapped.

    ``with torch.device("meta")`` recognizes factories by identity, from a list that is made at its first use. If
    the list were made after the wrapping, the context would silently have no effect.
    """
    from torch.utils._device import _device_constructors

    _device_constructors()


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _place[-1]
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _patch_factories() -> None:
    """Schedules, optimizers, gradient scaling and clipping request ``device="cuda"`` or pinned memory.

    The wrappers are known to TorchScript as the operators that they wrap, and to pickle under torch's names.
    """
    for name in _FACTORIES:
        create = _on_cpu(getattr(torch, name))
        create.__module__ = "torch"
        create.__qualname__ = name
        torch_script_operators._register_builtin(create, f"aten::{name}")
        setattr(torch, name, create)


class _TypeName(str):
    """The name of a tensor type that also equals the name of the CUDA type."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.replace(other, "torch.cuda.", "torch.") == str(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _patch_tensor_methods() -> None:
    """``.cuda()`` and pinning return the tensor; the optimizer accepts only ``torch.cuda.*Tensor`` types."""
    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def named_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return _TypeName(answer) if isinstance(answer, str) else answer

    def itself(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.type = named_type  # type: ignore[assignment]
    torch.Tensor.cuda = itself  # type: ignore[assignment]
    torch.Tensor.pin_memory = itself  # type: ignore[assignment]
    torch.nn.Module.cuda = itself  # type: ignore[assignment]


class _TorchNamespace(ModuleType):
    """The names of ``torch``, except for ``device``."""

    device: Callable[[str], torch.device]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def patch_fsdp_device(module: Any) -> None:
    """Megatron-FSDP compares its device with ``torch.device(f"cuda:{index}")``, which becomes the CPU.

    Only in the module's namespace: replacing ``torch.device`` itself would break ``isinstance`` elsewhere.
    """
    names = _TorchNamespace("torch")
    names.device = lambda name: _CPU
    module.torch = names


def _patch_all_to_all() -> None:
    """MoE dispatch passes split sizes as tensors or arrays; gloo accepts only lists of int."""
    exchange = dist.all_to_all_single

    def as_list(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return exchange(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op
        )

    dist.all_to_all_single = all_to_all_single


def _patch_uneven_collectives() -> None:
    """Let ranks gather and scatter different numbers of tokens, for experts; gloo alone needs equal parts."""
    gather = dist.all_gather

    @functools.wraps(gather)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return gather(tensor_list, tensor, group, async_op)
        assert not async_op, "uneven gathers are synchronous"
        padded = tensor.new_zeros(max(len(part) for part in tensor_list), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        received = [torch.empty_like(padded) for _ in tensor_list]
        gather(received, padded, group)
        for part, filled in zip(tensor_list, received, strict=True):
            part.copy_(filled[: len(part)])
        return None

    @functools.wraps(dist.reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "only sums are supported"
        rows = len(output)
        ranks = len(input_list)
        received = output.new_empty(ranks * rows, *output.shape[1:])
        sizes = [len(part) for part in input_list]
        dist.all_to_all_single(received, torch.cat(input_list), [rows] * ranks, sizes, group)
        output.copy_(received.view(ranks, *output.shape).sum(0))

    dist.all_gather = all_gather
    dist.reduce_scatter = reduce_scatter


def _patch_coalescing_manager() -> None:
    """Give each tensor a collective: gloo's coalesced all-gather corrupts memory (torch 2.11)."""

    @contextlib.contextmanager
    def coalescing_manager(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or dist.group.WORLD
        manager = distributed_c10d._CoalescingManager()
        collectives = distributed_c10d._world.pg_coalesce_state.setdefault(group, [])
        yield manager
        del distributed_c10d._world.pg_coalesce_state[group]
        for collective in collectives:
            tensors = [
                tensor
                for tensor in (collective.dst_tensor, collective.tensor)
                if tensor is not None
            ]
            options = {} if collective.redop is None else {"op": collective.redop}
            manager.append(collective.op(*tensors, **options, group=group, async_op=True))
        if not async_ops:
            manager.wait()

    dist._coalescing_manager = coalescing_manager
    distributed_c10d._coalescing_manager = coalescing_manager


def _patch_optimizers() -> None:
    """PyTorch's optimizers import TorchDynamo, in 1 s, to break its graphs; without TorchDynamo there are none."""
    methods = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    steps = [(kind, "step") for kind in kinds if "step" in vars(kind)]
    for kind, name in [*((torch.optim.Optimizer, method) for method in methods), *steps]:
        method = vars(kind)[name]
        # an earlier instance has hooked the step of its class
        if hasattr(method, "__wrapped__") and not hasattr(method, "hooked"):
            setattr(kind, name, _without_dynamo(method, method.__wrapped__))


def _without_dynamo(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` if TorchDynamo is there, else what it wraps, with gradients as ``Optimizer.step`` sets them."""

    @functools.wraps(method)
    def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return method(self, *args, **kwargs)
        if method.__name__ != "step":
            return plain(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return plain(self, *args, **kwargs)

    return call


def _widen_products() -> None:
    """Products in bf16 take 4 to 15 times the time of fp32 on a processor without bf16 instructions."""
    from megatron.bridge.backends.kernels import widened_products

    widened_products.install()


def patch_linear(module: Any) -> None:
    """Let layers multiply with the library that is faster on this processor."""
    from megatron.bridge.backends.kernels import onednn_linear

    if onednn_linear.is_faster():
        for name in (
            "linear_with_grad_accumulation_and_async_allreduce",
            "linear_with_frozen_weight",
        ):
            setattr(module, name, onednn_linear.replacing(getattr(module, name)))


def patch_results_queue(module: Any) -> None:
    """Collect the results of a synchronous save in a plain queue.

    Otherwise the first ``dist_checkpointing.save`` starts a manager process that imports ``__main__`` again, which
    takes 1.4 to 9.6 s and raises an EOFError in scripts without a main guard. A writer in another process must set
    ``module._results_queue = None`` first to get that manager.
    """
    module._results_queue = queue.Queue()


_CUDA_WARNINGS = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"When using async grad allreduce it is recommended to set .* CUDA_DEVICE_MAX_CONNECTIONS",
    r"full scope is deprecated\. Use empty cuda_graph_modules",
    r"Only transformer-engine>=1\.7\.0 supports MoE experts",
)
_HARMLESS_WARNINGS = (
    r"Could not determine rank from torch\.distributed",  # a process without a launcher is rank 0
    r"The \.grad attribute of a Tensor that is not a leaf",  # the optimizer's shards are views of parameters
)


@contextlib.contextmanager
def core_import_context() -> Iterator[None]:
    """The settings under which ``megatron.core`` is imported; none where kernels can be compiled for a GPU."""
    if not installed():
        with _without_compile() if compiler.lacks_compiler() else contextlib.nullcontext():
            yield
        return
    silence_core_warnings()
    with warnings.catch_warnings(), _without_compile(), _without_cuda_home_warning():
        warnings.simplefilter(
            "ignore", SyntaxWarning
        )  # in the source of Megatron-Core, once per machine
        yield


def silence_core_warnings() -> None:
    """Ignore warnings about missing CUDA packages from now on: every model emits them."""
    for sentence in (*_CUDA_WARNINGS, *_HARMLESS_WARNINGS):
        warnings.filterwarnings("ignore", message=sentence)


def _without_compile() -> contextlib.AbstractContextManager[None]:
    """Leave Megatron-Core's small functions uncompiled.

    ``jit_fuser`` is ``torch.compile``, applied where functions are defined: 16 to 29 s of C++ compilation in the
    first step, instead of 0.05 to 0.1 s. Disabling it after the import has no effect. With a GPU and without a C
    compiler or Python's headers, the first call would raise an error.
    """
    return patched(torch, compile=_leave_uncompiled)


def _leave_uncompiled(
    model: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def _without_cuda_home_warning() -> Iterator[None]:
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(_is_not_cuda_home_warning)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_cuda_home_warning)


def _is_not_cuda_home_warning(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()
