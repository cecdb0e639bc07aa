# SPDX-License-Identifier: Apache-2.0
"""Send the weights of a model in training to an inference engine."""
