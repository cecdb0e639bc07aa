# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers in PyTorch: Mamba-2, gated delta nets and short convolutions."""
