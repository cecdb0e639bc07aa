# SPDX-License-Identifier: Apache-2.0
"""Phi 3 and 4."""
