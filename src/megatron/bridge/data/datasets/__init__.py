# SPDX-License-Identifier: Apache-2.0
"""Datasets under their public names."""
