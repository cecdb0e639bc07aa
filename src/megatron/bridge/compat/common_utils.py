# SPDX-License-Identifier: Apache-2.0
"""The rank helper under the name that programs with loops of their own import."""

from megatron.bridge.utils.distributed import rank as get_rank_safe

__all__ = ["get_rank_safe"]
