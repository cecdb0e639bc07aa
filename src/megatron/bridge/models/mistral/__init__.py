# SPDX-License-Identifier: Apache-2.0
"""Mistral, Ministral and Mixtral."""
