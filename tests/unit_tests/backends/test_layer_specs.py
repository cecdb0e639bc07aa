# SPDX-License-Identifier: Apache-2.0
"""The choice of a backend, and models built from its layer specs."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.backends.hardware import compiler
from megatron.bridge.backends.kernels import compiled
from megatron.bridge.backends.kernels.norms import RMSNorm
from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")
MOE = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1],
}


def build(kind=TransformerConfig, mtp=False, **settings):
    torch.manual_seed(1)
    config = kind(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **settings,
    )
    decoder = layer_specs.decoder_block_spec(config, "torch")
    extra = {"mtp_block_spec": layer_specs.mtp_block_spec(config, decoder, "torch")} if mtp else {}
    return GPTModel(
        config,
        decoder,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        **extra,
    )


def logits(model, tokens, positions=None, **kwargs):
    positions = torch.arange(tokens.size(1)).expand_as(tokens) if positions is None else positions
    return model(input_ids=tokens, position_ids=positions, attention_mask=None, **kwargs)


def test_backend_by_name():
    assert layer_specs.resolve_backend("torch") == "torch"
    assert layer_specs.resolve_backend("auto") in layer_specs.BACKENDS
    with pytest.raises(UserError, match="'te' is not one of"):
        layer_specs.resolve_backend("te")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformer Engine may run there")
def test_transformer_engine_needs_a_gpu():
    with pytest.raises(UserError, match="use 'torch' or 'auto'"):
        layer_specs.resolve_backend("transformer_engine")
    assert layer_specs.resolve_backend("auto") == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="some of these run there")
def test_settings_that_cannot_be_honoured_are_listed():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    config.gradient_accumulation_fusion = config.bias_dropout_fusion = True
    changes = {change.field: change for change in layer_specs.apply_backend_settings(config)}
    assert set(changes) == {"gradient_accumulation_fusion", "bias_dropout_fusion"}
    assert config.use_cpu_initialization
    assert not config.gradient_accumulation_fusion
    assert changes["gradient_accumulation_fusion"].asked is True
    assert changes["gradient_accumulation_fusion"].used is False
    assert "Apex" in changes["gradient_accumulation_fusion"].reason
    assert layer_specs.apply_backend_settings(config) == []


def test_transformer_engine_has_the_compiled_kernels(monkeypatch):
    """Rotary embeddings and cross entropy are Megatron-Core's own under it, and operate element by element."""
    monkeypatch.setattr(compiler, "why_not_compiled", lambda: None)
    monkeypatch.setattr(moe_utils, "fused_permute", max)
    installed = [
        (rope_utils, "_apply_rotary_pos_emb_bshd"),
        (rope_utils, "_apply_rotary_pos_emb_thd"),
    ]
    installed += [(tensor_parallel, "vocab_parallel_cross_entropy")]
    for module, name in installed:
        monkeypatch.setattr(module, name, None)
    monkeypatch.delenv(compiler.WORKERS_VARIABLE, raising=False)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=2
    )
    config.apply_rope_fusion = config.gradient_accumulation_fusion = True
    (change,) = layer_specs.apply_backend_settings(config, "transformer_engine")
    assert change.field == "gradient_accumulation_fusion", "the output layer would raise an error"
    assert config.moe_permute_fusion
    assert config.apply_rope_fusion, "what Transformer Engine has stays on"
    assert {getattr(module, name).__module__ for module, name in installed} == {compiled.__name__}
    dense = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    dense.activation_func, dense.gated_linear_unit = F.silu, True
    assert layer_specs.apply_backend_settings(dense, "transformer_engine") == []
    assert dense.bias_activation_fusion
    assert not dense.moe_permute_fusion


@pytest.mark.parametrize(
    ("frequency", "pattern"), [(1, [1, 1, 1]), (2, [1, 0, 1]), ([0, 1, 1], [0, 1, 1])]
)
def test_moe_pattern(frequency, pattern):
    config = TransformerConfig(
        num_layers=3, hidden_size=8, num_attention_heads=2, num_moe_experts=2
    )
    config.moe_layer_freq = frequency
    assert layer_specs.moe_pattern(config) == pattern
    config.num_moe_experts = None
    assert layer_specs.moe_pattern(config) == [0, 0, 0]


@pytest.mark.parametrize("frequency", [[0, 1], [0, 1, 2]])
def test_moe_pattern_must_fit_the_layers(frequency):
    config = TransformerConfig(
        num_layers=3, hidden_size=8, num_attention_heads=2, num_moe_experts=2
    )
    config.moe_layer_freq = frequency
    with pytest.raises(UserError, match="moe_layer_freq"):
        layer_specs.moe_pattern(config)


def test_same_parameters_as_megatrons_local_layers():
    model = build(qk_layernorm=True)
    local = GPTModel(
        model.config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
    )
    shapes, theirs = ({n: p.shape for n, p in m.named_parameters()} for m in (model, local))
    assert shapes == theirs
    assert isinstance(model.decoder.final_layernorm, RMSNorm)
    assert isinstance(model.decoder.layers[0].self_attention.core_attention, TorchAttention)
    local.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(model, tokens), logits(local, tokens), atol=1e-5, rtol=1e-4)


def test_checkpoint_keys_are_those_of_fused_layers():
    """Norms are saved where Transformer Engine's layers, which fuse them, look for them."""
    keys = {
        tensor.key
        for tensor in build(**MOE).sharded_state_dict().values()
        if hasattr(tensor, "key")
    }
    dense, sparse = "decoder.layers.0.", "decoder.layers.1."
    for layer in (dense, sparse):
        assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in keys
        assert f"{layer}input_layernorm.weight" not in keys
    assert f"{dense}mlp.linear_fc1.layer_norm_weight" in keys
    assert f"{sparse}pre_mlp_layernorm.weight" in keys
    assert f"{sparse}mlp.experts.experts.linear_fc2.weight" in keys


def test_packed_sequences_do_not_see_each_other():
    model = build(num_query_groups=2)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 64, (1, length), generator=generator) for length in (5, 12, 7)]
    ends = torch.tensor([0, 5, 17, 24], dtype=torch.int32)
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=12, max_seqlen_kv=12)
    positions = torch.cat([torch.arange(part.size(1)) for part in parts])[None]
    together = logits(model, torch.cat(parts, dim=1), positions, packed_seq_params=params)
    alone = torch.cat([logits(model, part) for part in parts], dim=1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


MLA = {
    "kind": MLATransformerConfig,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(MLA | {"q_lora_rank": 16}, id="latent"),
        pytest.param(MLA | {"q_lora_rank": None}, id="latent-plain-queries"),
        pytest.param(MLA | {"q_lora_rank": 16} | MOE, id="latent-experts"),
        pytest.param({"mtp": True, "mtp_num_layers": 1}, id="multi-token"),
        pytest.param({"qk_l2_norm": True}, id="l2-norm"),
        pytest.param({"bias_activation_fusion": True}, id="fused-swiglu"),
        pytest.param(MOE | {"bias_activation_fusion": True}, id="fused-swiglu-experts"),
        pytest.param({"attention_output_gate": True}, id="gate"),
        pytest.param(MOE | {"moe_shared_expert_intermediate_size": 16}, id="shared-expert"),
    ],
)
def test_other_layers_train(settings):
    """Layers that later families need: causal, and a gradient for every parameter."""
    model = build(**settings)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    logits(model, tokens, labels=labels).mean().backward()
    missing = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not missing
    changed = tokens.clone()
    changed[:, 9] += 1
    model.eval()
    with torch.no_grad():
        before, after = logits(model, tokens), logits(model, changed % 64)
    torch.testing.assert_close(before[:, :9], after[:, :9], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(before[:, 9], after[:, 9])


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
)
def test_recomputation_changes_nothing(settings):
    """Dropout included: the recomputed forward pass draws the same masks."""
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    grads = []
    for extra in ({}, settings):
        model = build(**extra)
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.dropout = layer.hidden_dropout = 0.2
        model_parallel_cuda_manual_seed(3)
        logits(model, tokens, labels=tokens).mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
