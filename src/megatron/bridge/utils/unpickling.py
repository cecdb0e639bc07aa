# SPDX-License-Identifier: Apache-2.0
"""Read the pickles of a checkpoint without running the code that they name.

A pickle names functions, which Python calls while it reads the pickle. Here, a pickle may name only classes of
checkpoints: torch's metadata, tensors, and plain values. An unpickler with a fixed list reads ``.metadata``, and
torch's weights-only unpickler reads the files of ``torch.save``. All other names are refused, unless the user trusts
the checkpoint.
"""

import dataclasses
import io
import pickle
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast, override

import numpy
import torch
from torch.distributed.checkpoint import Metadata

from megatron.bridge.utils.errors import UserError


def _with_modules(names_by_module: dict[str, list[str]]) -> set[tuple[str, str]]:
    return {(module, name) for module, names in names_by_module.items() for name in names}


METADATA_NAMES = _with_modules(
    {
        "collections": ["OrderedDict"],
        "pathlib": ["PosixPath"],
        "pathlib._local": ["PosixPath"],
        "torch": ["Size", "device"],
        "torch.serialization": ["_get_layout"],
        "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
        "torch.distributed.checkpoint.metadata": [
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ],
    }
)
"""(module, name) of everything that ``.metadata`` may name without trust, in addition to torch's dtypes."""
STATE_NAMES = _with_modules(
    {
        "_codecs": ["encode"],
        "collections": ["OrderedDict"],
        "megatron.core.safe_globals": [
            "safe_load_from_bytes"
        ],  # Megatron-Core uses it instead of torch's own
        "numpy": ["dtype", "ndarray"],
        "numpy._core.multiarray": ["_reconstruct", "scalar"],
        "torch._utils": ["_rebuild_tensor_v2"],
    }
)
"""(module, name) of the parts of pickled tensors and arrays."""

# Names in numpy's arrays and random states, in addition to those that Megatron-Core declares as safe.
torch.serialization.add_safe_globals(
    [
        cast(Any, numpy)._core.multiarray.scalar,
        *(type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code != "O"),
    ]
)

_trusted = False


class UntrustedPickleError(UserError):
    """A pickle contains a name that is not allowed in a checkpoint."""

    def __init__(self, source: str, name: str) -> None:
        super().__init__(
            f"{source} contains {name}, which can run code when it is read: if you trust the author, set "
            "checkpoint.trust_checkpoint=true for a run, or give a command --trust-checkpoint"
        )


def trust_checkpoints(trust: bool = True) -> None:
    """Allow any pickle in checkpoints that this process reads, which can run code."""
    global _trusted  # noqa: PLW0603 - Megatron-Core reads in threads, where a context variable would be unset
    _trusted = trust


def is_trusted() -> bool:
    return _trusted


@contextmanager
def trusting(trust: bool) -> Generator[None]:
    """Trust checkpoints inside the block if ``trust`` is true."""
    before = _trusted
    trust_checkpoints(trust or before)
    try:
        yield
    finally:
        trust_checkpoints(before)


def read_metadata(stream: IO[bytes], source: str) -> Metadata:
    """Read a ``.metadata`` file, which may name only ``METADATA_NAMES``; messages call it ``source``."""
    return _load_stream(stream, source, METADATA_NAMES)


def read_states(data: bytes, source: str, package: str) -> Any:
    """Read a pickle of plain values and of dataclasses, named tuples and dictionaries of ``package``.

    Raises:
        UntrustedPickleError: the pickle names anything else.
    """
    return _load_stream(io.BytesIO(data), source, STATE_NAMES, f"{package}.")


def read_plain(stream: IO[bytes], source: str) -> Any:
    """Read a pickle of numbers, strings, and collections of them."""
    return _load_stream(stream, source, set())


def read_torch(file: Path | io.BytesIO, source: str, **options: Any) -> Any:
    """Read a file of ``torch.save`` with the ``options`` of ``torch.load``.

    Raises:
        UntrustedPickleError: it names anything but tensors, plain values and names that Megatron-Core declares as safe.
    """
    if _trusted:
        return torch.load(file, weights_only=False, **options)
    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if names := _unsafe_names(file):
            raise UntrustedPickleError(source, names[0]) from error
        raise


def check_readable(value: object, source: str) -> None:
    """Raise an ``UntrustedPickleError`` if ``value`` contains anything that ``read_torch`` refuses."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    read_torch(stream, source)


def _unsafe_names(file: Path | io.BytesIO) -> list[str]:
    data = file.read_bytes() if isinstance(file, Path) else file.getvalue()
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return []
    return torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, io.BytesIO(data)))


def _load_stream(
    stream: IO[bytes], source: str, names: set[tuple[str, str]], prefix: str | None = None
) -> Any:
    return pickle.load(stream) if _trusted else _Unpickler(stream, source, names, prefix).load()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: IO[bytes], source: str, names: set[tuple[str, str]], prefix: str | None
    ) -> None:
        super().__init__(stream)
        self._source = source
        self._names = names
        self._prefix = prefix

    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._names or is_dtype or self._is_state(module, name):
            return super().find_class(module, name)
        raise UntrustedPickleError(self._source, f"{module}.{name}")

    def _is_state(self, module: str, name: str) -> bool:
        """Return whether the name is a class without its own code; a dotted name could lead out of the module."""
        if self._prefix is None or not module.startswith(self._prefix) or "." in name:
            return False
        stored_class = super().find_class(module, name)
        return isinstance(stored_class, type) and (
            dataclasses.is_dataclass(stored_class) or issubclass(stored_class, (dict, tuple))
        )
