# SPDX-License-Identifier: Apache-2.0
"""Small helpers without policy, used by every layer."""
