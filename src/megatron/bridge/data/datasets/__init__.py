# SPDX-License-Identifier: Apache-2.0
"""Data sets and their parts, under the names that scripts know."""
