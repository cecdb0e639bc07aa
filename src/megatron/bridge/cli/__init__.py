# SPDX-License-Identifier: Apache-2.0
"""The megatron-bridge command, one file a subcommand."""
