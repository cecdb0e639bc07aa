# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI-compatible endpoints for the engine."""
