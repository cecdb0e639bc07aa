# SPDX-License-Identifier: Apache-2.0
"""Prompts without answers, for reinforcement learning."""
