# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers in PyTorch: Mamba-1 and 2, delta nets and short convolutions."""
