# SPDX-License-Identifier: Apache-2.0
"""New models from trained ones: experts from dense layers, and smaller models. Both are Hugging Face folders."""
