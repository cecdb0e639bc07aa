# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to one prompt, of which one is preferred."""
