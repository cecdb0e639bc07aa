# SPDX-License-Identifier: Apache-2.0
"""Layer specs of each backend."""
