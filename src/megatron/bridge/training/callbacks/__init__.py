# SPDX-License-Identifier: Apache-2.0
"""Callbacks: everything that a run does besides its training steps."""

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.state import CallbackContext

__all__ = ["Callback", "CallbackContext", "CallbackManager"]
