# SPDX-License-Identifier: Apache-2.0
"""Import parts of nvidia-resiliency-ext."""

from importlib import import_module
from typing import Any

from megatron.bridge.utils.errors import UserError


def import_nvrx(module: str, key: str) -> Any:
    """Import ``nvidia_resiliency_ext.<module>``.

    Raises:
        UserError: It cannot be imported, although ``key`` of the config needs it.
    """
    try:
        return import_module(f"nvidia_resiliency_ext.{module}")
    except ImportError as error:
        raise UserError(
            f"{key} is set, but nvidia-resiliency-ext cannot be imported ({error}): install the extra "
            f"`resiliency`, or unset {key}"
        ) from error
