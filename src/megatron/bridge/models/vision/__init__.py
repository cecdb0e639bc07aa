# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: transformers' own vision tower in front of Megatron's decoder."""
