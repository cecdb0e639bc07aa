# SPDX-License-Identifier: Apache-2.0
"""The file that launchers start."""
