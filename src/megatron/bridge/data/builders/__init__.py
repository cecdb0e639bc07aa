# SPDX-License-Identifier: Apache-2.0
"""Configs of data sets, under the names that scripts know."""
