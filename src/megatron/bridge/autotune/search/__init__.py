# SPDX-License-Identifier: Apache-2.0
"""Search the fastest layout that fits: candidates, their predicted costs, and why others are worse."""
