# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge: Hugging Face checkpoints in and out of Megatron-Core, with or without a GPU.

Importing this package costs no torch: ``AutoBridge`` is loaded when it is first used. It registers a hook that
prepares Megatron-Core for a machine without a GPU at the moment when ``megatron.core`` is first imported, and a
finder for the paths at which other programs import parts of this package.
"""

import sys
from typing import TYPE_CHECKING, Any

from megatron.bridge.backends.cpu import import_hook
from megatron.bridge.compat import foreign_paths
from megatron.bridge.utils import clash
from megatron.bridge.version import __version__

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

__all__ = ["AutoBridge", "__version__"]

clash.refuse_others(sys.modules["megatron"].__path__)
import_hook.register()
foreign_paths.register()


def __getattr__(name: str) -> Any:
    if name == "AutoBridge":
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        return AutoBridge
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
