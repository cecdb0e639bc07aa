# SPDX-License-Identifier: Apache-2.0
"""The declarations of a bridge: config fields, and blocks of parameter names."""
