# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's endpoints around the engine."""
