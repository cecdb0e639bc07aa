# SPDX-License-Identifier: Apache-2.0
"""Evaluation with lm-evaluation-harness."""
