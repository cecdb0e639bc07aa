# SPDX-License-Identifier: Apache-2.0
"""Adapters: a few trained numbers beside frozen weights, under any parallel layout."""
