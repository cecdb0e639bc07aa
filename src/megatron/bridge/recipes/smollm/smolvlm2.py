# SPDX-License-Identifier: Apache-2.0
"""SmolVLM2, small enough for a laptop. The learning rate is our own.

Activations of the tower depend on the images and are not in the memory named here.
"""

from megatron.bridge.recipes.builders import finetune_recipe

smolvlm2_256m_finetune_config = finetune_recipe("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", lr=1e-4)
"""SmolVLM2 256M full fine-tuning, 1 x H100 80GB: 8 GB, no model parallelism."""
