# SPDX-License-Identifier: Apache-2.0
"""A small Megatron GPT, built from Megatron-Core alone, under any parallel layout."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

VOCABULARY = 64
SEQUENCE = 16


def build(tp=1, pp=1, vp=None, cp=1, sp=False, seed=1, **overrides):
    """Chunks of this rank; weights depend on the seed and on the layout."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=vp, context_parallel_size=cp
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    options = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gated_linear_unit": True,
        "tied": True,
        "vocabulary": VOCABULARY,
        **overrides,
    }
    tied, vocabulary = options.pop("tied"), options.pop("vocabulary")
    config = TransformerConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **options,
    )
    return [_chunk(config, stage, vocabulary, tied) for stage in (range(vp) if vp else (None,))]


def _chunk(config, stage, vocabulary, tied):
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocabulary,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=stage is None, vp_stage=stage
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=stage is None, vp_stage=stage
        ),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=stage,
    )
