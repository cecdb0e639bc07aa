# SPDX-License-Identifier: Apache-2.0
"""Measure this machine: kernels, messages between processes, and layers of a model."""
