# SPDX-License-Identifier: Apache-2.0
"""What a config costs before it runs: memory and arithmetic, worked out without a GPU."""
