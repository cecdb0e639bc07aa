# SPDX-License-Identifier: Apache-2.0
"""What images and videos add to a sample of text: tokens, pixels and positions."""
