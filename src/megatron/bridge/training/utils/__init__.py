# SPDX-License-Identifier: Apache-2.0
"""Calls that trainers outside of this package make; see docs/rl.md."""
