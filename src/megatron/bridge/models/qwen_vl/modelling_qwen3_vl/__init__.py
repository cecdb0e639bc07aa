# SPDX-License-Identifier: Apache-2.0
"""Names of vision-language models that programs with loops of their own import."""
