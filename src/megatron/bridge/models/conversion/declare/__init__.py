# SPDX-License-Identifier: Apache-2.0
"""What a bridge declares: config fields, and blocks of parameter names."""
