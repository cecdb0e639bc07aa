# SPDX-License-Identifier: Apache-2.0
"""Callbacks that detect faults: NaN, hangs, stragglers, preemption."""
