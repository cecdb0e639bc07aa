# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: the loss of its indexer against the formula, packed rows, operations, and what is refused."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

from megatron.bridge.backends.attention import sparse_attention
from megatron.bridge.models.features.sparse_attention import check_stage
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.testing.reference import Case
from megatron.bridge.utils.errors import UserError
from tests.families import harness, next_tokens
from tests.families.row import Row
from tests.families.rows import ROWS
from tests.unit_tests.models.test_latent_attention import provider_of

COEFFICIENT = 0.7


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    found = harness.Case("deepseek_v32", tmp_path_factory.mktemp("deepseek_v32"))
    harness.save(harness.hf_model(found.row), found.checkpoint)
    return found


def build(case, **changes):
    bridge = harness.AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    for name, value in changes.items():
        setattr(provider, name, value)
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    return chunk


def run(chunk, ids, packed=None):
    return chunk(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)


def divergence(core, x, latent, query, key, sparse):
    """The loss of one layer for one sequence, by the formula, with a loop over queries."""
    config, indexer = core.config, core.indexer
    index = indexer(x.detach(), latent.detach())
    total = 0
    for t in range(len(x)):
        weights = index.weights[t, 0]
        products = torch.relu(index.queries[t, 0] @ index.keys[: t + 1, 0].T)
        scores = weights @ products
        attention = torch.stack(
            [
                (query[t, 0, head] @ key[: t + 1, 0, head].T) * core.scale
                for head in range(query.size(2))
            ]
        )
        seen = torch.arange(t + 1)
        if sparse:
            seen = scores.topk(min(config.dsa_indexer_topk, t + 1)).indices
        wanted = attention[:, seen].softmax(-1).mean(0).detach()
        total = total + (wanted * (wanted.log() - scores[seen].log_softmax(-1))).sum()
    return total / len(x)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_indexer_learns_what_attention_does(case, sparse):
    chunk = build(case, dsa_indexer_loss_coeff=COEFFICIENT, dsa_indexer_use_sparse_loss=sparse)
    DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    core = chunk.decoder.layers[1].self_attention.core_attention
    given = {}

    def note(_, inputs, options):
        given.update(query=inputs[0].detach(), key=inputs[1].detach(), **options)

    core.register_forward_pre_hook(note, with_kwargs=True)
    (run(chunk, case.batch[0][:1]) ** 2).sum().backward()
    found = {name: weight.grad.clone() for name, weight in core.indexer.named_parameters()}
    core.indexer.zero_grad()
    loss = divergence(core, given["x"], given["qr"], given["query"], given["key"], sparse)
    (COEFFICIENT * loss).backward()
    for name, weight in core.indexer.named_parameters():
        assert weight.grad.abs().max() > 0
        torch.testing.assert_close(
            found[name], weight.grad, rtol=1e-3, atol=1e-6 + 1e-4 * weight.grad.abs().max()
        )


def test_the_loss_changes_no_other_gradient(case):
    grads = []
    for coefficient in (None, COEFFICIENT):
        chunk = build(case, dsa_indexer_loss_coeff=coefficient)
        (run(chunk, case.batch[0]) ** 2).sum().backward()
        grads.append({name: weight.grad for name, weight in chunk.named_parameters()})
    for name, gradient in grads[0].items():
        if ".indexer." in name:
            assert gradient is None
            assert grads[1][name].abs().max() > 0
        else:
            assert torch.equal(gradient, grads[1][name]), name


def test_scores_in_small_blocks_are_the_same(case, monkeypatch):
    ids = case.batch[0]
    chunk = build(case, dsa_indexer_loss_coeff=COEFFICIENT)
    whole = run(chunk, ids)
    monkeypatch.setattr(sparse_attention, "_SCORES", 2000)
    torch.testing.assert_close(run(chunk, ids), whole)


def test_sequences_of_a_packed_row_do_not_see_each_other(case):
    chunk, ids = build(case), case.batch[0][:1]
    bounds = torch.tensor([0, 27, 40], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=27, max_seqlen_kv=27)
    with torch.no_grad():
        found = run(chunk, ids, packed)
        parts = [run(chunk, ids[:, start:stop]) for start, stop in ((0, 27), (27, 40))]
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
def test_recomputed_layers_make_the_same_choice(case):
    grads = []
    for changes in (
        {},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
    ):
        chunk = build(case, dsa_indexer_loss_coeff=COEFFICIENT, **changes).train()
        (run(chunk, case.batch[0]) ** 2).sum().backward()
        grads.append({name: weight.grad for name, weight in chunk.named_parameters()})
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_operations(case):
    chunk, config = build(case), ROWS["deepseek_v32"].config

    def between(length):
        return flops_per_token([chunk], length) - flops_per_token([chunk], 1)

    def seen(length, most):
        return sum(min(place + 1, most) for place in range(length)) / length

    heads, width = config["num_attention_heads"], 10 + 12 + 14
    index = config["index_n_heads"] * (config["index_head_dim"] + 1)
    each = 2 * width * heads * (seen(30, 9) - 1) + 2 * index * (seen(30, 30) - 1)
    assert between(30) == pytest.approx(3 * 4 * each, rel=1e-9)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            "deepseek_v32",
            {"dsa_kernel_backend": "tilelang"},
            "dsa_kernel_backend='tilelang' is not supported",
        ),
        (
            "deepseek_v32",
            {"dsa_indexer_rotate_activation": True},
            "dsa_indexer_rotate_activation=True is not supp",
        ),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=None must be positive"),
        ("deepseek_v32", {"dsa_indexer_topk": 0}, "dsa_indexer_topk=0 must be positive"),
        (
            "deepseek_v32",
            {"dsa_indexer_head_dim": 10},
            "dsa_indexer_head_dim=10 is less than qk_pos_emb_head_dim=12",
        ),
        (
            "deepseek_v32",
            {"linear_attention_freq": 2},
            "linear_attention_freq has no effect without",
        ),
        ("glm_moe_dsa", {"mtp_num_layers": 1}, "mtp_num_layers=1 does not support: set it to None"),
        (
            "glm_moe_dsa",
            {
                "pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.float32,
                "recompute_granularity": "selective",
            },
            "recompute_granularity='selective' with pipeline_model_parallel_size=2",
        ),
    ],
)
def test_what_is_refused(row, changes, message):
    provider = provider_of(ROWS[row])
    for name, value in changes.items():
        setattr(provider, name, value)
    with pytest.raises(UserError, match=message):
        provider.finalize()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full", "shared", "shared", "full"], None),
        (["full", "full", "shared", "full"], None),
        (["full", "shared", "full", "full"], "only 'full' layers at equal distances"),
        (["shared", "full", "shared", "full"], "only 'full' layers at equal distances"),
        (
            ["full", "none", "full", "full"],
            "indexer_types='none' is not supported; known: full, shared",
        ),
    ],
)
def test_which_layers_may_share(kinds, message):
    row = ROWS["glm_moe_dsa"]
    changed = type(row)(row.name, row.model, {**row.config, "indexer_types": kinds})
    if message:
        with pytest.raises(UserError, match=message):
            provider_of(changed)
    else:
        assert harness.AutoBridge.hf_config_of(provider_of(changed))["indexer_types"] == kinds


def test_a_stage_cannot_begin_with_a_shared_layer():
    provider = provider_of(ROWS["glm_moe_dsa"])
    provider.dsa_indexer_topk_freq = 4
    with pytest.raises(
        UserError, match="begins a stage with layer 3, which takes the choice of an earlier one"
    ):
        check_stage(provider, 3)


def test_layers_of_further_predictions_have_indexers_of_their_own(tmp_path):
    row = ROWS["deepseek_v32"]
    case = Case(
        Row(row.name, row.model, {**row.config, "num_nextn_predict_layers": next_tokens.DEPTHS}),
        tmp_path,
    )
    harness.save(harness.hf_model(case.row), case.checkpoint)
    next_tokens.add_layers(case.checkpoint)
    (case.checkpoint / "README.md").write_text("The card of a toy.\n")
    bridge = harness.AutoBridge.from_hf_pretrained(case.checkpoint)
    (chunk,) = model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert (
        "mtp.layers.1.mtp_model_layer.self_attention.core_attention.indexer.k_norm.bias"
        in chunk.state_dict()
    )
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert harness.different_files(case, tmp_path / "out") == []
    assert run(chunk, case.batch[0]).isfinite().all()


@pytest.mark.parametrize("kind", ["p2p", "a2a", ["all_gather", "p2p"]])
def test_queries_need_the_keys_of_all_ranks(case, kind):
    bridge = harness.AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    provider.context_parallel_size = 2
    provider.cp_comm_type = kind
    problems = " ".join(provider.feature_problems())
    assert f"cp_comm_type={kind} is not supported" in problems
    assert "cp_comm_type='all_gather'" in problems
