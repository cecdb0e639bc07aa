# SPDX-License-Identifier: Apache-2.0
"""What happens around the steps of a run, one concern a module."""

from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.state import CallbackContext

__all__ = ["Callback", "CallbackContext", "CallbackManager"]
