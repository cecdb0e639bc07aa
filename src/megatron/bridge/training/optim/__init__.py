# SPDX-License-Identifier: Apache-2.0
"""Optimizer, parameter groups, learning-rate schedule, and the optimizer state in a checkpoint."""
