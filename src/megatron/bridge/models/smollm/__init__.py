# SPDX-License-Identifier: Apache-2.0
"""SmolLM3; SmolLM2 is a Llama."""
