# SPDX-License-Identifier: Apache-2.0
"""WebDatasets, read by Megatron Energon."""

from megatron.bridge.data.energon.energon_config import EnergonProvider

__all__ = ["EnergonProvider"]
