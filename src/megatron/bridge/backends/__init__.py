# SPDX-License-Identifier: Apache-2.0
"""Layer specs, attention, kernels and sharding for the hardware at hand; the CPU device layer."""
