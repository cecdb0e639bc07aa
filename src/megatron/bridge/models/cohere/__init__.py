# SPDX-License-Identifier: Apache-2.0
"""Cohere's Command models."""
