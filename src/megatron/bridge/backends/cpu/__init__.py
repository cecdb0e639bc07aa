# SPDX-License-Identifier: Apache-2.0
"""Make Megatron-Core run on a machine without a GPU."""
