# SPDX-License-Identifier: Apache-2.0
"""Make Megatron-Core run on CPU tensors and gloo where there is no CUDA device.

Each function below is one adaptation with its reason. `install` applies those that concern torch, once per
process, before ``megatron.core`` is imported (see `megatron.bridge.backends.import_hook`); the functions that take
a module adjust that module of Megatron-Core right after it was imported. The changes are global to the process and
are not undone. With CUDA present nothing here changes anything.
"""

import contextlib
import functools
import logging
import queue
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

_MARK = "__megatron_bridge_cpu__"
_CPU = torch.device("cpu")


def has_cuda() -> bool:
    """Whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def installed() -> bool:
    """Whether the CPU device layer is active in this process."""
    return hasattr(torch.cuda.current_device, _MARK)


def install() -> None:
    """Apply the device layer; nothing happens with CUDA present, or the second time."""
    if has_cuda() or installed():
        return
    _keep_device_contexts_working()
    _answer_with_the_cpu_device()
    _stand_in_for_streams()
    _share_the_cpu_generator()
    _create_on_the_cpu()
    _leave_tensors_where_they_are()
    _accept_any_split_sizes()
    _gather_uneven_parts()


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function


# --------------------------------------------------------------------------------------- devices and streams


def _answer_with_the_cpu_device() -> None:
    """``torch.cuda.current_device()`` is passed as ``device=`` in ~175 places; the others guard or measure."""

    @_marked
    def current_device() -> torch.device:
        return _CPU

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "set_stream"):
        setattr(torch.cuda, name, _no_action())
    torch.cuda.nvtx.range_push = _no_action()
    torch.cuda.nvtx.range_pop = _no_action()


def _no_action() -> Callable[..., None]:
    """What CPU execution needs where CUDA would need an action: it is synchronous, with one memory.

    A new function each time, because torch.compile refuses to load if one function has two names in torch.
    """

    def no_action(*args: Any, **kwargs: Any) -> None:
        pass

    return no_action


class _Event:
    """A point in time; work on the CPU is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds from this event to ``end``."""
        return (end._at - self._at) * 1e3

    def query(self) -> bool:
        return True

    wait = synchronize = _no_action()


class _Stream:
    """The only order of execution there is."""

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

    wait_event = wait_stream = synchronize = _no_action()


def _stand_in_for_streams() -> None:
    """Gradient buffers, token dispatchers, pipeline sends and checkpoint writers order work by streams."""
    only = _Stream()
    torch.cuda.Event = _Event  # type: ignore[assignment, misc]
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: only  # type: ignore[assignment]
    torch.cuda.default_stream = lambda device=None: only  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.record_stream = _no_action()  # type: ignore[assignment]


# -------------------------------------------------------------------------------------------- random numbers


def _get_rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _share_the_cpu_generator() -> None:
    """What Megatron-Core keeps as the GPU's generator is here the CPU's, from which dropout really draws."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    namespaces: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in namespaces:
        module.manual_seed = manual_seed
        module.get_rng_state = _get_rng_state
        module.set_rng_state = _set_rng_state


def draw_from_the_cpu_generator(module: Any) -> None:
    """Restore random states at once, and fork the CPU's generator without a warning.

    Without CUDA, ``_set_cuda_rng_state`` only queues a call for the day CUDA is initialised: the state is never
    restored, silently, and dropout under recomputation draws another mask than the forward pass did. The tracker
    of Megatron-Core further takes a change of the CPU generator inside ``fork`` for a mistake.
    """

    class CpuRNGStatesTracker(module.CudaRNGStatesTracker):
        """Named random states that take turns in the CPU's generator."""

        @contextlib.contextmanager
        def fork(self, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"no random state named {name!r}: seed model parallelism first")
            outer_name, outer = self._current_state_name, torch.get_rng_state()
            if outer_name in self.states_:  # a fork inside may continue it
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


# --------------------------------------------------------------------------------------------------- tensors

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
)


def _keep_device_contexts_working() -> None:
    """Let torch note its own factories before they are wrapped.

    ``with torch.device("meta")`` recognises factories by identity, from a list made at its first use: made after
    the wrapping, the context would have no effect, silently.
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
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _create_on_the_cpu() -> None:
    """Schedules, optimizers, gradient scaling and clipping name ``device="cuda"`` outright, or pinned memory."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


class _TypeName(str):
    """A tensor's type name that equals CUDA's spelling of the same type, too."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.replace(other, "torch.cuda.", "torch.") == str(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _leave_tensors_where_they_are() -> None:
    """``.cuda()`` and pinning are identities; the optimizer insists on ``torch.cuda.*Tensor`` types."""
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


class _Names(ModuleType):
    """A module with a function ``device`` of its own; the other names are those of ``torch``."""

    device: Callable[[str], torch.device]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def answer_with_the_cpu_for_an_index(module: Any) -> None:
    """Megatron-FSDP compares its device with the one named by ``cuda:`` and the current index: here, with the CPU.

    In its own namespace alone: a torch whose ``device`` is a function would break ``isinstance`` elsewhere.
    """
    names = _Names("torch")
    names.device = lambda name: _CPU
    module.torch = names


# ---------------------------------------------------------------------------------- collectives, checkpoints


def _accept_any_split_sizes() -> None:
    """MoE dispatch passes split sizes as tensors or arrays; gloo takes lists of int only, else a TypeError."""
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
        return exchange(output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op)

    dist.all_to_all_single = all_to_all_single


def _gather_uneven_parts() -> None:
    """Experts that are cut (ETP) and shared out (EP) gather as many tokens as were sent to each rank.

    Gloo gathers equal parts only, and scatters no list of parts.
    """
    gather = dist.all_gather

    @functools.wraps(gather)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return gather(tensor_list, tensor, group, async_op)
        assert not async_op, "nobody asks for it"
        padded = tensor.new_zeros(max(len(part) for part in tensor_list), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        received = [torch.empty_like(padded) for _ in tensor_list]
        gather(received, padded, group)
        for part, filled in zip(tensor_list, received, strict=True):
            part.copy_(filled[: len(part)])
        return None

    @functools.wraps(dist.reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor, input_list: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        assert op == dist.ReduceOp.SUM, "nobody asks for another"
        rows, ranks = len(output), len(input_list)
        received = output.new_empty(ranks * rows, *output.shape[1:])
        sizes = [len(part) for part in input_list]
        dist.all_to_all_single(received, torch.cat(input_list), [rows] * ranks, sizes, group)
        output.copy_(received.view(ranks, *output.shape).sum(0))

    dist.all_gather = all_gather
    dist.reduce_scatter = reduce_scatter


def collect_write_results_in_process(module: Any) -> None:
    """Collect the results of a synchronous save in a plain queue.

    Otherwise the first ``dist_checkpointing.save`` starts a manager process that imports ``__main__`` again:
    1.4 to 9.6 s, and an EOFError for scripts without a main guard. A writer in another process needs
    ``module._results_queue = None`` first, and then gets that manager.
    """
    module._results_queue = queue.Queue()


# ----------------------------------------------------------------------------------- importing Megatron-Core


_ABOUT_CUDA_ONLY = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"When using async grad allreduce it is recommended to set .* CUDA_DEVICE_MAX_CONNECTIONS",
    r"full scope is deprecated\. Use empty cuda_graph_modules",
    r"Only transformer-engine>=1\.7\.0 supports MoE experts",
)
_OF_NO_CONSEQUENCE = (
    r"Could not determine rank from torch\.distributed",  # a process without a launcher is rank 0
    r"The \.grad attribute of a Tensor that is not a leaf",  # the optimizer's shards are views of parameters
)


@contextlib.contextmanager
def importing_core() -> Iterator[None]:
    """What holds while ``megatron.core`` is imported; nothing with CUDA present."""
    if not installed():
        yield
        return
    # Said by modules that are imported later, on demand, and by every model: these filters stay.
    for sentence in (*_ABOUT_CUDA_ONLY, *_OF_NO_CONSEQUENCE):
        warnings.filterwarnings("ignore", message=sentence)
    with warnings.catch_warnings(), _functions_left_uncompiled(), _silence_about_cuda_home():
        warnings.simplefilter("ignore", SyntaxWarning)  # of Megatron-Core's own source, once per machine
        yield


@contextlib.contextmanager
def _functions_left_uncompiled() -> Iterator[None]:
    """Megatron-Core's small functions as they are written.

    ``jit_fuser`` is ``torch.compile``, bound as functions are defined: 16 to 29 s of C++ compilation at the first
    step, against 0.05 to 0.1 s without. Disabling it after the import has no effect.
    """
    compile_, torch.compile = torch.compile, _uncompiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


def _uncompiled(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def _silence_about_cuda_home() -> Iterator[None]:
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(_not_about_cuda_home)
    try:
        yield
    finally:
        logger.removeFilter(_not_about_cuda_home)


def _not_about_cuda_home(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()
