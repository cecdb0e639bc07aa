# SPDX-License-Identifier: Apache-2.0
"""C kernels for generation on CPUs, which this machine's compiler translates at first use.

Attention to the keys of several texts: PyTorch's kernel attends to those of one text a call, and packs bfloat16 keys
anew each time. With one new token of each of 32 texts of 100 tokens, 30 layers took 80 ms (float32: 57 ms) on one core,
this kernel 8 ms (9 ms); a layer of a prompt of 75 tokens took 0.36 ms, here 0.19 ms, and of 2,400 tokens 110 ms and
91 ms. RMSNorm, rotary embeddings and SwiGLU are one call each, where PyTorch has 5 to 9 operators of a few rows.
Without a C compiler, PyTorch's operators are used.
"""

import ctypes
import functools
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FLAGS = {torch.float32: [], torch.bfloat16: ["-DBFLOAT16"]}
_OPTIMIZE = (
    "-O3 -fPIC -fopenmp -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno"
)

_log = logging.getLogger(__name__)
_in_use = ContextVar("in_use", default=False)


@contextmanager
def in_use() -> Iterator[None]:
    """Use the kernels for norms, rotary embeddings and SwiGLU inside the context; training has its own."""
    token = _in_use.set(True)
    try:
        yield
    finally:
        _in_use.reset(token)


def takes(x: Tensor) -> bool:
    """Return whether the kernels are in use and support ``x``."""
    return _in_use.get() and is_supported(x)


def is_supported(x: Tensor) -> bool:
    """Return whether the kernels support the device and dtype of ``x`` and compile on this machine."""
    return x.device.type == "cpu" and x.dtype in _FLAGS and _load_library(x.dtype) is not None


def _rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.size(-1)
    _call_kernel("rms_norm", x, gain, out, x.numel() // width, width, eps)
    return out


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    rows, _, heads, width = x.shape
    _call_kernel("rotate", x, cos, sin, out, rows, heads, width // 2, x.stride(0), x.stride(2))
    return out


def _gate_swiglu(x: Tensor) -> Tensor:
    x, width = x.contiguous(), x.size(-1) // 2
    out = x.new_empty(*x.shape[:-1], width)
    _call_kernel("swiglu", x, out, out.numel() // width, width)
    return out


def _call_kernel(name: str, x: Tensor, *arguments: Tensor | float) -> None:
    """Call a kernel for the dtype of ``x``."""
    getattr(_load_library(x.dtype), name)(
        *(
            argument.data_ptr() if isinstance(argument, Tensor) else argument
            for argument in (x, *arguments)
        )
    )


LANES = 16
"""Features of a panel of weights."""


def pack_panels(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as panels [ceil(out / LANES), in, LANES], with zeros for missing features."""
    features, width = weight.shape
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -features % LANES))
    return padded.view(-1, LANES, width).transpose(1, 2).contiguous()


def multiply_panels(x: Tensor, panels: Tensor, bias: Tensor | None, features: int) -> Tensor:
    """Compute ``x @ weight.T + bias`` for x [..., in] in float32, rounded once.

    A row has the same bits for any number of rows.
    """
    return torch.ops.megatron_bridge.multiply_panels(x, panels, bias, features)


def _multiply_panels(x: Tensor, panels: Tensor, bias: Tensor | None, features: int) -> Tensor:
    x, width = x.contiguous(), x.size(-1)
    out = x.new_empty(*x.shape[:-1], features)
    library = _load_library(x.dtype)
    assert library is not None, "is_supported() comes first"
    bias_pointer = None if bias is None else bias.data_ptr()
    sizes = (x.numel() // width, width, features)
    pointers = (x.data_ptr(), panels.data_ptr(), bias_pointer, out.data_ptr())
    if library.multiply_panels(*pointers, *sizes):
        raise MemoryError(f"no memory for the products of {sizes[0]} rows")
    return out


class _Tensors(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "out")
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("key_row", "value_row", "tokens", "texts", "groups", "heads", "width")
        ),
        ("scale", ctypes.c_float),
    ]


def attend(
    new: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    tokens: Tensor,
    starts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Store the new keys and values in the caches, and write attention to the tokens' rows of ``out``.

    Args:
        new: queries [rows, h, d], keys and values [rows, g, d].
        caches: keys and values [places, g, d], contiguous.
        tokens: int64 [tokens, 4]: the row of each token, its place in the caches, and the first place and the number
            of the keys that it sees.
        starts: int64 [texts + 1]: bounds of the tokens of each text, which follow each other there.
        out: [rows, h, d], contiguous.
    """
    torch.ops.megatron_bridge.cached_attention(*new, *caches, tokens, starts, scale, out)


def _attend_to_texts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    starts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    query = query.contiguous()
    key = key.flatten(1)
    value = value.flatten(1)
    assert key.stride(1) == value.stride(1) == 1, "the features of a token lie side by side"
    groups, width = keys.shape[1:]
    heads = query.size(1) // groups
    shape = _Shape(
        key.stride(0), value.stride(0), len(tokens), len(starts) - 1, groups, heads, width, scale
    )
    tensors = _Tensors(*(tensor.data_ptr() for tensor in (query, key, value, keys, values, out)))
    library = _load_library(query.dtype)
    assert library is not None, "is_supported() comes first"
    tables = (ctypes.c_void_p(table.data_ptr()) for table in (tokens, starts))
    if library.attend(ctypes.byref(tensors), ctypes.byref(shape), *tables):
        raise MemoryError(f"no memory for the attention scores of {len(tokens)} tokens")


@functools.cache
def _load_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    source = Path(__file__).with_suffix(".c")
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        with tempfile.TemporaryDirectory() as folder:
            object_file = f"{folder}/kernels.o"
            library = f"{folder}/kernels.so"
            flags = [*_OPTIMIZE.split(), *_processor_flags(), *_FLAGS[dtype]]
            _run_compiler([*compiler, *flags, "-c", str(source), "-o", object_file])
            # Linking without -fopenmp leaves OpenMP to PyTorch's own library, so both use the same threads.
            _run_compiler([*compiler, "-shared", object_file, "-o", library])
            return _declare_types(ctypes.CDLL(library))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning(
            "no C compiler, so decoding is slower; install gcc, or set CC to a compiler: %s", error
        )
        return None


def _processor_flags() -> list[str]:
    """Return the compiler's options for the instructions that PyTorch uses on this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return ["-march=native", "-mprefer-vector-width=512"]
    if capability == "AVX2":  # the processor may have more, and ATEN_CPU_CAPABILITY asks for less
        return ["-march=haswell", "-mtune=native"]
    return ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


def _declare_types(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    library.rms_norm.argtypes = [pointer] * 3 + [size] * 2 + [ctypes.c_float]
    library.rotate.argtypes = [pointer] * 4 + [size] * 5
    library.swiglu.argtypes = [pointer] * 2 + [size] * 2
    library.multiply_panels.argtypes = [pointer] * 4 + [size] * 3
    return library


def _run_compiler(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


_OPERATORS = torch.library.Library("megatron_bridge", "FRAGMENT")


def _define_operator(name: str, function: Callable[..., object], *mutates: str) -> Any:
    """Make an operator of a function, so that ``op_recorder`` sees its calls."""
    _OPERATORS.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    _OPERATORS.impl(name, function, "CPU")
    return getattr(torch.ops.megatron_bridge, name).default


FUNCTIONS = {
    _define_operator(
        "cached_attention", _attend_to_texts, "keys", "values", "out"
    ): _attend_to_texts,
    _define_operator("rms_norm", _rms_norm): _rms_norm,
    _define_operator("rotate", _rotate_heads): _rotate_heads,
    _define_operator("swiglu", _gate_swiglu): _gate_swiglu,
    _define_operator("multiply_panels", _multiply_panels): _multiply_panels,
}
"""The functions behind the operators; PyTorch's dispatcher takes 5 us more to call one."""
