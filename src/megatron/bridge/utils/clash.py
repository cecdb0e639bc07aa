# SPDX-License-Identifier: Apache-2.0
"""Detect another package with the import name ``megatron.bridge``."""

from collections.abc import Iterable
from pathlib import Path

_OURS = "utils/clash.py"
_WAY_OUT = (
    "use a separate environment for each, or uninstall both and install hf-megatron-bridge last"
)


def refuse_others(roots: Iterable[str]) -> None:
    """Raise an ``ImportError`` if modules of two packages could be mixed in ``roots``, the folders of ``megatron``."""
    for root in map(Path, roots):
        package = root / "bridge"
        if (package / "__init__.py").is_file() and not (package / _OURS).is_file():
            raise ImportError(
                f"{package} is not hf-megatron-bridge, but also has megatron.bridge: {_WAY_OUT}"
            )
        for record in (
            root.parent.glob("megatron_core-*.dist-info/RECORD") if package.is_dir() else ()
        ):
            if "megatron/bridge/" in record.read_text(errors="replace"):
                raise ImportError(
                    f"{record.parent.name} also has the modules of hf-megatron-bridge: {_WAY_OUT}"
                )
