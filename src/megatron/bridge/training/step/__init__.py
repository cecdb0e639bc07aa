# SPDX-License-Identifier: Apache-2.0
"""The forward step, and the losses of a global batch."""
