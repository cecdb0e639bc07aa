# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2 and V3, Kimi K2 and Moonlight."""
