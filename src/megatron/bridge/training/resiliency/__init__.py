# SPDX-License-Identifier: Apache-2.0
"""Restarts and heartbeats through nvidia-resiliency-ext."""
