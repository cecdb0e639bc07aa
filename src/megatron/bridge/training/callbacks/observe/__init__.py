# SPDX-License-Identifier: Apache-2.0
"""Callbacks that show what a run does: logs, metrics, profiles, samples."""
