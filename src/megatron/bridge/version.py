# SPDX-License-Identifier: Apache-2.0
"""The version of the package, readable without importing anything else."""

__version__ = "0.1.0"
