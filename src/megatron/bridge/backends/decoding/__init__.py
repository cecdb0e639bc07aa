# SPDX-License-Identifier: Apache-2.0
"""Caches of layers between decoding steps: keys and values, latents, recurrent states."""
