# SPDX-License-Identifier: Apache-2.0
"""Compare a Megatron model with its Hugging Face original."""
