# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine on machines without a GPU: its own Python classes with kernels of plain PyTorch."""
