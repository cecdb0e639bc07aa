# SPDX-License-Identifier: Apache-2.0
"""Conversations with tools, reasoning and structured answers: what they ask for, and how their answers are read."""
