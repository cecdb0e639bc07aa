# SPDX-License-Identifier: Apache-2.0
"""Callbacks that a run cannot do without: evaluation, saving, positions, the run lock."""
