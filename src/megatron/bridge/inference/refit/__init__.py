# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that trains, into an engine that generates."""
