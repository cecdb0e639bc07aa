# SPDX-License-Identifier: Apache-2.0
"""A GPT model on the torch backend gives one process's losses and gradients under any layout of two."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.specs.layer_specs import apply_backend_settings, decoder_block_spec
from tests.functional_tests.backends.test_context_parallel import zigzag

TOKENS, BATCH, VOCAB, EXPERTS = 16, 2, 64, 4
MOE = {
    "num_moe_experts": EXPERTS,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1],
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


def build(settings):
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        qk_layernorm=True,
        **{"normalization": "RMSNorm", "add_bias_linear": False, **settings},
    )
    apply_backend_settings(config)
    return GPTModel(
        config,
        decoder_block_spec(config, "torch"),
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )


def losses(model, tokens, positions):
    """[batch, tokens] losses of predicting the same tokens, and their sum's gradients in the model."""
    loss = model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens)
    loss.sum().backward()
    return loss.detach()


def compare(sizes, settings):
    """Largest relative differences of losses, norm gradients and expert gradients from a model of one process."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=generator)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    model_settings = {
        key: value
        for key, value in settings.items()
        if key not in ("sequence_parallel", "cp_comm_type")
    }

    parallel_state.initialize_model_parallel()
    reference = build(model_settings)
    expected = losses(reference, tokens, positions)
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(**sizes)
    model = build(settings | sizes)
    rank, split = dist.get_rank(), sizes.get("context_parallel_size", 1)
    if split > 1:
        tokens, positions, expected = (
            zigzag(t.t(), rank, split).t() for t in (tokens, positions, expected)
        )
    actual = losses(model, tokens, positions)
    differences = [relative(actual, expected)]
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            grad = parameter.grad.clone()
            per_head = "q_layernorm" in name or "k_layernorm" in name
            if (
                split > 1
                or settings.get("sequence_parallel")
                or (per_head and "tensor_model_parallel_size" in sizes)
            ):
                dist.all_reduce(grad)
            differences.append(relative(grad, theirs[name].grad))
        elif ".experts.linear_fc2." in name and sizes.get("expert_tensor_parallel_size", 1) == 1:
            differences.append(expert_difference(name, parameter, theirs, sizes))
    return max(differences)


def expert_difference(name, parameter, theirs, sizes):
    """An expert sees the tokens of both ranks, which hold the same batch unless they share it as TP ranks."""
    kind, index = name.rstrip("0123456789"), int(name[len(name.rstrip("0123456789")) :])
    ranks = sizes.get("expert_model_parallel_size", 1)
    everyone = 1 if "tensor_model_parallel_size" in sizes else ranks
    expert = index + dist.get_rank() * EXPERTS // ranks if ranks > 1 else index
    return relative(parameter.grad, everyone * theirs[f"{kind}{expert}"].grad)


def relative(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


TP = {"tensor_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        pytest.param(TP, {}, id="tp"),
        pytest.param(TP, SP, id="tp-sp"),
        pytest.param(
            TP,
            {"normalization": "LayerNorm", "add_bias_linear": True, **SP},
            id="tp-sp-layernorm-bias",
        ),
        pytest.param(CP, {"cp_comm_type": "all_gather"}, id="cp-all-gather"),
        pytest.param(CP, {"cp_comm_type": "a2a"}, id="cp-a2a"),
        pytest.param(
            CP,
            {"cp_comm_type": "a2a", "window_size": (3, 0), "window_attn_skip_freq": 2},
            id="cp-window",
        ),
        pytest.param(EP, MOE, id="ep"),
        pytest.param(EP, MOE | {"add_bias_linear": True}, id="ep-bias"),
        pytest.param(EP, MOE | {"moe_token_dispatcher_type": "allgather"}, id="ep-allgather"),
        pytest.param(TP | EP | {"expert_tensor_parallel_size": 1}, MOE | SP, id="tp-ep"),
        pytest.param(TP | {"expert_tensor_parallel_size": 2}, MOE | SP, id="etp"),
    ],
)
def test_equals_one_process(two_workers, sizes, settings):
    for difference in two_workers.run(compare, sizes, settings):
        assert difference < 1e-4


def exchange(kind):
    """all_to_all_single with split sizes as MoE dispatch passes them."""
    rank = dist.get_rank()
    sizes = kind([1, 2]) if rank == 0 else kind([3, 1])
    outputs = kind([1, 3]) if rank == 0 else kind([2, 1])
    out = torch.empty(4 if rank == 0 else 3)
    dist.all_to_all_single(out, torch.arange(3.0 if rank == 0 else 4.0) + 10 * rank, outputs, sizes)
    return out.tolist()


def as_tensor(sizes):
    return torch.tensor(sizes)


def as_array(sizes):
    return torch.tensor(sizes).numpy()


@pytest.mark.parametrize("kind", [list, as_tensor, as_array])
def test_split_sizes_of_any_kind(two_workers, kind):
    assert two_workers.run(exchange, kind) == [[0.0, 10.0, 11.0, 12.0], [1.0, 2.0, 13.0]]
