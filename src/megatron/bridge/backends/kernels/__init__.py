# SPDX-License-Identifier: Apache-2.0
"""Small fused operations of a layer: norms, activations, rotary embedding, cross entropy."""
