# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: datasets of records, whose samples are packed or padded into rows."""
