# SPDX-License-Identifier: Apache-2.0
"""The proof that a family is converted exactly, for the tests of your own package; nothing else imports this."""

from megatron.bridge.testing.family import check_family
from megatron.bridge.testing.row import Row

__all__ = ["Row", "check_family"]
