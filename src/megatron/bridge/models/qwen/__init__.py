# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 to 3, dense and mixture-of-experts."""
