# SPDX-License-Identifier: Apache-2.0
"""Mappings between a Megatron parameter and Hugging Face tensors with the same values."""
