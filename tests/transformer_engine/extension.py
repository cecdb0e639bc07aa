# SPDX-License-Identifier: Apache-2.0
"""Import the Python part of Transformer Engine without its compiled extension.

The released wheel ``transformer_engine`` holds only Python: the classes whose constructors, parameters and
attributes Megatron-Core's layer specs build on. They import ``transformer_engine_torch``, which has the kernels;
here that name is a module whose attributes are placeholders, which cannot be called.
"""

import enum
import importlib
import os
import sys
import types
import warnings
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "te"

# enumerations whose members Transformer Engine compares with its own when it is imported
_ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
}


class _Placeholder(type):
    """A class with any attribute, each of them such a class, and a number, as members of C++ enumerations have."""

    def __getattr__(cls, name: str) -> "_Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Placeholder(name, (), {})
        setattr(cls, name, value)
        return value

    def __int__(cls) -> int:
        return id(cls)


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Placeholder(name, (), {})
        setattr(self, name, value)
        return value


def install() -> None:
    """Make ``import transformer_engine.pytorch`` work here; ``megatron.core`` must not be imported yet."""
    extension = _Extension("transformer_engine_torch")
    for name, members in _ENUMERATIONS.items():
        setattr(extension, name, enum.IntEnum(name, members, start=0))
    sys.modules["transformer_engine_torch"] = extension
    sys.path.insert(0, str(FOLDER))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not look for the shared libraries
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the extension is missing
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda name: None
        importlib.import_module("transformer_engine.pytorch")
