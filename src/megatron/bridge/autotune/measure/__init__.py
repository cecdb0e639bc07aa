# SPDX-License-Identifier: Apache-2.0
"""Times of this machine: of kernels, of messages between processes, and of a model's layers."""
