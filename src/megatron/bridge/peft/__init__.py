# SPDX-License-Identifier: Apache-2.0
"""Adapters: a few trained parameters for frozen weights, under any parallel layout."""
