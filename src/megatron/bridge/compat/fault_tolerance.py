# SPDX-License-Identifier: Apache-2.0
"""Stub for foreign training loops: ``ft`` is refused."""

from typing import Any, NoReturn

from megatron.bridge.utils.errors import UserError


def setup(config: Any, state: Any = None) -> NoReturn:
    """Refuse ``config.ft``: callbacks of ``training.loop`` send heartbeats."""
    raise UserError(
        "ft.enable_ft_package=True: only runs of pretrain and finetune send heartbeats; unset ft, and watch the "
        "processes from the program that starts them"
    )


maybe_setup_simulated_fault = setup
