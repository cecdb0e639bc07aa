# SPDX-License-Identifier: Apache-2.0
"""Vision-language families: rows of tiny random models, and samples with images of several sizes."""
