# SPDX-License-Identifier: Apache-2.0
"""The bridges of one family; each is imported at its first use."""

from megatron.bridge.models.presets import lazy_bridges

__getattr__ = lazy_bridges(__name__)
