# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: PyTorch's FSDP2 and Megatron-FSDP."""
