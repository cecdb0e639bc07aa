# SPDX-License-Identifier: Apache-2.0
"""Conversion between Hugging Face and Megatron-Core: mappings, plan, exchange, bridges."""
