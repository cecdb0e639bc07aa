# SPDX-License-Identifier: Apache-2.0
"""How a Megatron parameter and its Hugging Face tensors hold the same numbers."""
