# SPDX-License-Identifier: Apache-2.0
"""Configuration, set-up and the loop."""
