# SPDX-License-Identifier: Apache-2.0
"""Mamba-1's scan and delta nets that decay each channel, against their definitions, and the mixers in packed rows."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.bridge.backends.recurrent import gated_delta_net, mamba1
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.unit_tests.backends.test_gated_delta import (
    BOUNDS,
    LENGTH,
    assert_same,
    by_sequence,
    random,
)
from tests.unit_tests.models.test_gpt_provider import toy
from tests.unit_tests.models.test_simple_families import provider_of


def channel_inputs(dtype=torch.float64):
    q, k = (F.normalize(random(2, LENGTH, 3, 8, seed=seed), dim=-1) for seed in (1, 2))
    g, beta = -(2 * random(2, LENGTH, 3, 8, seed=4)).exp(), random(2, LENGTH, 3, seed=5).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, random(2, LENGTH, 3, 5, seed=3), g, beta)]


def recurrence(q, k, v, g, beta):
    """The definition: one token after the other."""
    state, found = torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1], dtype=q.dtype), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        recalled = torch.einsum("bhk,bhkd->bhd", k[:, t], state)
        state = state + torch.einsum(
            "bhk,bhd->bhkd", k[:, t], beta[:, t, :, None] * (v[:, t] - recalled)
        )
        found.append(torch.einsum("bhk,bhkd->bhd", q[:, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(found, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_channels_that_decay_by_themselves(dtype, tolerance):
    given = channel_inputs(dtype)
    assert_same(
        gated_delta_net.chunk_gated_delta_rule(*given)[0], recurrence(*given), given, tolerance
    )


def test_channels_in_a_packed_row():
    given = channel_inputs()
    found, _ = gated_delta_net.chunk_gated_delta_rule(*given, cu_seqlens=BOUNDS)
    assert_same(found, by_sequence(recurrence, BOUNDS, *given), given, 1e-12)


def test_the_selective_scan():
    x, dt, b, c = (random(2, 150, width, seed=width, dtype=torch.float32) for width in (7, 8, 5, 6))
    dt, rate = F.softplus(dt[..., :7]), -random(7, 5, seed=9, dtype=torch.float32).exp()
    c = c[..., :5]
    given = [part.requires_grad_() for part in (x, dt, rate, b, c)]
    state, outputs = torch.zeros(2, 7, 5), []
    for t in range(150):
        state = (dt[:, t, :, None] * rate).exp() * state + (dt[:, t] * x[:, t])[..., None] * b[
            :, t, None
        ]
        outputs.append((state * c[:, t, None]).sum(-1))
    found, last = mamba1.selective_scan(*given)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)
    assert_same(found, torch.stack(outputs, 1), given, 1e-5)


def test_a_scan_that_goes_on():
    x, dt, b, c = (random(1, 90, width, seed=width, dtype=torch.float32) for width in (6, 6, 4, 4))
    dt, rate = F.softplus(dt), -torch.rand(6, 4)
    whole, last = mamba1.selective_scan(x, dt, rate, b, c)
    first, state = mamba1.selective_scan(x[:, :50], dt[:, :50], rate, b[:, :50], c[:, :50])
    second, state = mamba1.selective_scan(x[:, 50:], dt[:, 50:], rate, b[:, 50:], c[:, 50:], state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["jamba", "kimi_linear", "falcon_h1"])
@torch.no_grad()
def test_sequences_of_a_packed_row_do_not_see_each_other(name, tmp_path):
    case = harness.Case(name, tmp_path)
    harness.save(harness.hf_model(case.row), case.checkpoint)
    _, (chunk,) = harness.build(case, "one")
    ids, bounds = case.batch[0][:1], torch.tensor([0, 27, 40], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=27, max_seqlen_kv=27)
    found = chunk(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
    parts = [
        chunk(input_ids=part, position_ids=None, attention_mask=None)
        for part in (ids[:, :27], ids[:, 27:])
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)
    assert flops_per_token([chunk], 40) > flops_per_token([chunk], 20)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            "jamba",
            {"context_parallel_size": 5},
            "context_parallel_size=5 x tensor_model_parallel_size=1 does not divide mamba_num_heads=96",
        ),
        ("jamba", {"tensor_model_parallel_size": 5}, "_size=5 does not divide mamba_num_heads=96"),
        (
            "falcon_h1",
            {"context_parallel_size": 3},
            "context_parallel_size=3 x tensor_model_parallel_size=1 does not divide mamba_num_heads=8",
        ),
        (
            "falcon_h1",
            {"tensor_model_parallel_size": 3},
            "_size=3 does not divide mamba_num_heads=8",
        ),
        (
            "falcon_h1_groups",
            {"tensor_model_parallel_size": 4},
            "_size=4 does not divide mamba_num_groups=2",
        ),
        (
            "kimi_linear",
            {"context_parallel_size": 3},
            "context_parallel_size=3 x tensor_model_parallel_size=1 does not divide linear_num_key_heads=4",
        ),
        (
            "kimi_linear",
            {"tensor_model_parallel_size": 3},
            "_size=3 does not divide linear_num_key_heads=4",
        ),
        (
            "kimi_linear",
            {"linear_num_value_heads": 8},
            "linear_num_value_heads=8 is not supported with kda_layers",
        ),
        ("kimi_linear", {"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported with kda_layers"),
    ],
)
def test_what_is_refused(row, changes, message):
    provider = provider_of(row)
    for name, value in changes.items():
        setattr(provider, name, value)
    with pytest.raises(UserError, match=message):
        provider.finalize()


def test_plain_attention_has_no_kimi_delta_attention_beside_it():
    with pytest.raises(
        UserError, match="multi_latent_attention=False is not supported with kda_layers"
    ):
        toy(kda_layers=[1, 0], linear_num_key_heads=2, linear_num_value_heads=2).finalize()
