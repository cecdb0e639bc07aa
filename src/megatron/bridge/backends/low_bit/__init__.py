# SPDX-License-Identifier: Apache-2.0
"""Frozen weights that stay in memory in 4 or 8 bits."""
