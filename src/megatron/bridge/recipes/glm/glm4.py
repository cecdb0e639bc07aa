# SPDX-License-Identifier: Apache-2.0
"""GLM-4 of 2024 and of April 2025 (0414). Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

glm4_9b_pretrain_config = pretrain_recipe("zai-org/GLM-4-9B-0414", layout(tp=2), seq_length=8192, lr=3e-4)
"""GLM-4 9B pretraining, 16 x H100 80GB: 64 GB each, TP2."""
glm4_9b_chat_pretrain_config = pretrain_recipe("zai-org/glm-4-9b-chat-hf", layout(tp=2), seq_length=8192, lr=3e-4)
"""GLM-4 9B Chat (2024) pretraining, 16 x H100 80GB: 61 GB each, TP2."""
glm4_32b_pretrain_config = pretrain_recipe("zai-org/GLM-4-32B-0414", layout(tp=8), seq_length=8192, lr=2e-4)
"""GLM-4 32B pretraining, 32 x H100 80GB: 56 GB each, TP8."""

glm4_9b_finetune_config = finetune_recipe("zai-org/GLM-4-9B-0414", layout(tp=2))
"""GLM-4 9B full fine-tuning, 8 x H100 80GB: 57 GB each, TP2."""
glm4_9b_chat_finetune_config = finetune_recipe("zai-org/glm-4-9b-chat-hf", layout(tp=2))
"""GLM-4 9B Chat (2024) full fine-tuning, 8 x H100 80GB: 56 GB each, TP2."""
glm4_32b_finetune_config = finetune_recipe("zai-org/GLM-4-32B-0414", layout(tp=8))
"""GLM-4 32B full fine-tuning, 16 x H100 80GB: 59 GB each, TP8."""
