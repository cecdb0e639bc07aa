# SPDX-License-Identifier: Apache-2.0
"""LFM2: short convolutions among attention."""
