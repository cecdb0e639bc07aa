# SPDX-License-Identifier: Apache-2.0
"""Convert models between Hugging Face and Megatron-Core: mappings, plans, exchange between ranks, and bridges."""
