# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and OLMoE."""
