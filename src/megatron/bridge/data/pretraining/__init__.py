# SPDX-License-Identifier: Apache-2.0
"""Data for pretraining: indexed datasets, blends of them, and mock data."""
