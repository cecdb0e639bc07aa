# SPDX-License-Identifier: Apache-2.0
"""Parts of a bridge's declaration: config fields, and blocks of parameter names."""
