# SPDX-License-Identifier: Apache-2.0
"""Llava 1.5, NeXT and OneVision."""
