# SPDX-License-Identifier: Apache-2.0
"""Queries that grow with their position, also where a rank holds a part of the sequence or a row several."""

import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.bridge import AutoBridge
from megatron.bridge.models.features import multipliers
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError
from tests.families.rows.mistral import SIZE, YARN
from tests.toy_models import randomise, tokens
from tests.unit_tests.models.test_llama import TOLERANCE, difference


def group(size, rank):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def packed(*lengths, padded=None):
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    padded_ends = None if padded is None else torch.tensor((0, *padded)).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded_ends,
        cu_seqlens_kv_padded=padded_ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def positions(rows, keys=None, segments=None, where=None):
    query, key = torch.empty(rows, 1, 1, 1), torch.empty(keys or rows, 1, 1, 1)
    return multipliers._query_positions(query, key, segments, where).tolist()


def test_positions():
    assert positions(4) == [0, 1, 2, 3]
    assert positions(1, keys=9) == [8]
    assert positions(7, segments=packed(3, 4)) == [0, 1, 2, 0, 1, 2, 3]
    # rows of padding after a sequence, and after the last one
    assert positions(9, segments=packed(3, 3, padded=(4, 4))) == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_positions_of_context_parallel_ranks():
    # of four pieces of a sequence, the first rank has the outer ones
    assert positions(4, where=group(2, 0)) == [0, 1, 6, 7]
    assert positions(4, where=group(2, 1)) == [2, 3, 4, 5]
    segments = packed(4, 7, padded=(4, 8))
    assert positions(6, segments=segments, where=group(2, 0)) == [0, 3, 0, 1, 6, 7]
    assert positions(6, segments=segments, where=group(2, 1)) == [1, 2, 2, 3, 4, 5]


@pytest.fixture
def models(tmp_path):
    from transformers import Ministral3Config, Ministral3ForCausalLM

    torch.manual_seed(0)
    hf = Ministral3ForCausalLM(Ministral3Config(**{**SIZE, "rope_parameters": YARN})).eval()
    hf.config.dtype = torch.float32
    randomise(hf)
    hf.save_pretrained(tmp_path / "hf")
    return hf, tmp_path / "hf"


def test_packed_sequences_start_at_position_zero(models):
    hf, directory = models
    model = AutoBridge.from_hf_pretrained(directory).to_megatron_model(wrap_with_ddp=False)
    parts = tokens(rows=1, length=21)[0], tokens(rows=1, length=19, seed=2)[0]
    with torch.no_grad():
        expected = torch.cat([hf(input_ids=ids).logits for ids in parts], dim=1)
        found = model[0](
            input_ids=torch.cat(parts, dim=1),
            position_ids=torch.cat([torch.arange(21), torch.arange(19)])[None],
            attention_mask=None,
            packed_seq_params=packed(21, 19),
        )
    assert (found - expected).abs().max() <= TOLERANCE * expected.std()


def test_without_the_scaling_it_is_another_model(models):
    hf, directory = models
    provider = AutoBridge.from_hf_pretrained(directory).to_megatron_provider()
    assert provider.query_scaling_beta == YARN["llama_4_scaling_beta"]
    plain = copy.copy(provider)
    plain.query_scaling_beta = None
    assert (
        difference(hf, plain.provide_distributed_model(wrap_with_ddp=False)[0], *tokens())
        > 100 * TOLERANCE
    )


def test_a_scaling_without_its_length_is_refused():
    provider = GPTModelProvider(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, query_scaling_beta=0.1
    )
    with pytest.raises(
        UserError, match=r"query_scaling_beta=0.1 has no length .*original_max_position"
    ):
        provider.provide_distributed_model(wrap_with_ddp=False)
