# SPDX-License-Identifier: Apache-2.0
"""Adapters in the Hugging Face ``peft`` format."""
