# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest layout that fits: candidates, their prices, and why others lose."""
