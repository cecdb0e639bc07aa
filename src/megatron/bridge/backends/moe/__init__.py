# SPDX-License-Identifier: Apache-2.0
"""Grouped experts, and the metrics of auxiliary losses."""
