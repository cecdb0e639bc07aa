# SPDX-License-Identifier: Apache-2.0
"""Tokenizer configuration under its public name."""
