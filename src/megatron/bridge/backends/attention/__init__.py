# SPDX-License-Identifier: Apache-2.0
"""Core attention on PyTorch's kernels: dense, flash, with sinks, with context parallelism."""
