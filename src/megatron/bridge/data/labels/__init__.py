# SPDX-License-Identifier: Apache-2.0
"""Data for models with a head: texts with a class, and pairs of texts."""
