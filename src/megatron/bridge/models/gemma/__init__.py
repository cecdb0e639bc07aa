# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 3."""
