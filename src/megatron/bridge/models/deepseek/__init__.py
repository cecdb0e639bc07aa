# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2, V3 and V3.2, Kimi K2 and Moonlight."""
