# SPDX-License-Identifier: Apache-2.0
"""What ``training.distill`` is made of."""
