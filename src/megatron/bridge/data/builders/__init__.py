# SPDX-License-Identifier: Apache-2.0
"""Dataset configs under their public names."""
