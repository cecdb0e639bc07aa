# SPDX-License-Identifier: Apache-2.0
"""Public name of ``training.config.blocks.mixed_precision``."""

from megatron.bridge.training.config.blocks.mixed_precision import *  # noqa: F403
