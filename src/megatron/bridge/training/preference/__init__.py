# SPDX-License-Identifier: Apache-2.0
"""Preference tuning: the losses of pairs of answers, and the reference that they are measured against."""
