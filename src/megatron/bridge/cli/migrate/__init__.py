# SPDX-License-Identifier: Apache-2.0
"""Translate settings of other frameworks with tables."""
