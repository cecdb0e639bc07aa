# SPDX-License-Identifier: Apache-2.0
"""Initialization before the first step: parallel sizes, random states, and the trained part of a model."""
