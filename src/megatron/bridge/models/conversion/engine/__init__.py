# SPDX-License-Identifier: Apache-2.0
"""Run a conversion: plan, load, export, stream, and exchange between ranks."""
