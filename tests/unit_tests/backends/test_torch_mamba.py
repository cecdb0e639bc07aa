# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 layers without kernels equal their definition token by token; packed sequences stay apart."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron.bridge.backends.recurrent import mamba, ssd
from megatron.bridge.models import MambaModelProvider
from megatron.bridge.utils.errors import UserError

LENGTH, HEADS, GROUPS, WIDTH, STATES = 37, 6, 2, 5, 4


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(size=1.0, length=LENGTH):
    """x, steps, rates, B and C in double precision."""
    return [
        random(2, length, HEADS, WIDTH, seed=1).requires_grad_(),
        (size * random(2, length, HEADS, seed=2).exp()).requires_grad_(),
        (-random(HEADS, seed=3).exp()).requires_grad_(),
        random(2, length, GROUPS, STATES, seed=4).requires_grad_(),
        random(2, length, GROUPS, STATES, seed=5).requires_grad_(),
    ]


def recurrence(x, dt, rate, b, c):
    """The definition, one token after the other."""
    b, c = (part.repeat_interleave(HEADS // GROUPS, dim=2) for part in (b, c))
    state, found = torch.zeros(*x.shape[:1], *x.shape[2:], STATES, dtype=x.dtype), []
    for t in range(x.shape[1]):
        taken_up = dt[:, t, :, None, None] * x[:, t, :, :, None] * b[:, t, :, None, :]
        state = state * (dt[:, t] * rate).exp()[..., None, None] + taken_up
        found.append((state * c[:, t, :, None, :]).sum(-1))
    return torch.stack(found, 1)


@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
@pytest.mark.parametrize("size", [0.05, 1.0, 40.0])
def test_the_scan_equals_the_recurrence(chunk, size):
    given = inputs(size)
    weight = random(2, LENGTH, HEADS, WIDTH, seed=6)
    expected = recurrence(*given)
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), given)]
    found, _ = ssd.scan(*given, chunk)
    assert found.dtype == torch.float32
    for one, other in zip(
        [found, *torch.autograd.grad((found * weight).sum(), given)], wanted, strict=True
    ):
        assert (one - other).abs().max() <= 3e-6 * other.abs().max()


def test_a_small_step_among_large_ones_is_not_rounded_away():
    """The logarithms sum up to 10**6 here, where float32 has steps of 0.06."""
    given = inputs(length=64)
    with torch.no_grad():
        given[1].fill_(1e4)
        given[1][:, 40:44] = 1e-3
    found, expected = ssd.scan(*given, 64)[0], recurrence(*given)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (
        (found - expected).abs()[:, 40:44].max() <= 1e-6 * expected.abs()[:, 40:44].max()
    ).item()


def config(**changes):
    sizes = {
        "num_layers": 1,
        "hidden_size": 12,
        "num_attention_heads": 2,
        "hybrid_override_pattern": "M",
        "mamba_num_heads": HEADS,
        "mamba_head_dim": WIDTH,
        "mamba_num_groups": GROUPS,
        "mamba_state_dim": STATES,
        "mamba_smallest_step": 0.4,
        "layernorm_epsilon": 1e-2,
        "bf16": False,
    }
    return MambaModelProvider(**{**sizes, **changes}).resolved()


def mixer(kind=mamba.TorchMambaMixer, **changes):
    """One with random numbers, the same for every kind."""
    linears = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    made = kind(
        config(**changes), linears, d_model=12, d_conv=3, chunk_size=8, pg_collection=groups
    )
    for index, parameter in enumerate(made.parameters()):
        parameter.data.copy_(0.5 * random(*parameter.shape, seed=index))
    return made


def packed(*bounds, padded=None):
    bounds, padded = torch.tensor(bounds).int(), padded and torch.tensor(padded).int()
    return PackedSeqParams(
        "thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )


@pytest.mark.parametrize(
    ("row", "lengths"),
    [
        (packed(0, 5, 5, 28), [5, 23, 2]),
        (packed(0, 1, 30), [1, 29]),
        (packed(0, 3, 20, padded=[0, 8, 30]), [8, 22]),
    ],
)
def test_packed_sequences_do_not_see_one_another(one_rank, row, lengths):
    layer, x = mixer(), random(30, 1, 12, seed=20).float()
    found, _ = layer(x, packed_seq_params=row)
    alone = torch.cat([layer(part)[0] for part in x.split(lengths)])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
    assert (found - layer(x)[0]).abs().max() > 1e-3


def test_a_token_sees_no_later_one(one_rank):
    layer, x = mixer(), random(30, 2, 12, seed=20).float()
    changed = x.clone()
    changed[17:] = 0.0
    one, other = layer(x)[0], layer(changed)[0]
    assert torch.equal(one[:17], other[:17])
    assert not torch.equal(one[17], other[17])


def test_half_precision_is_near_single(one_rank):
    x = random(30, 2, 12, seed=20).float()
    whole, half = mixer()(x)[0], mixer().bfloat16()(x.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    assert (whole - half).abs().max() < 0.02 * whole.abs().max()


def test_an_outlined_mixer_takes_no_memory(one_rank):
    with torch.device("meta"):
        outlined = mamba.TorchMambaMixer(
            config(),
            MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            d_model=12,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        )
    assert {name for name, value in outlined.named_parameters() if not value.is_meta} == set()


def test_cached_inference_is_refused(one_rank):
    with pytest.raises(UserError, match=r"mamba-ssm.*use megatron.bridge.inference.LLM"):
        mixer()(torch.zeros(4, 1, 12), inference_context=object())


# ---- on kernels: theirs are not installed here, a stand-in of the same interface is -----------------------------


def stand_in(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    *,
    seq_idx,
    dt_limit,
    headdim,
    ngroups,
    **more,
):
    """``mamba_split_conv1d_scan_combined``, one token after the other."""
    assert (more["activation"], more["norm_before_gate"], chunk_size) == ("silu", False, 8)
    inner, states = len(dt_bias) * headdim, ngroups * STATES
    z, x, dt = zxbcdt.double().split([inner, inner + 2 * states, len(dt_bias)], dim=-1)
    number = torch.zeros(x.shape[:2]) if seq_idx is None else seq_idx
    total = conv1d_bias.double().expand_as(x)
    for back in range(conv1d_weight.shape[1]):
        same = F.pad(number + 1, (back, 0))[:, : x.shape[1]] == number + 1
        before = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * same[..., None]
        total = total + before * conv1d_weight[:, -1 - back].double()
    x, b, c = F.silu(total).split([inner, states, states], dim=-1)
    x, b, c = (
        x.unflatten(-1, (-1, headdim)),
        b.unflatten(-1, (ngroups, -1)),
        c.unflatten(-1, (ngroups, -1)),
    )
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    parts = [number[0] == which for which in number[0].unique()]
    y = torch.cat(
        [recurrence(x[:, own], dt[:, own], A, b[:, own], c[:, own]) for own in parts], dim=1
    )
    return ((y + D[:, None] * x).flatten(-2) * F.silu(z)).float()


@pytest.mark.parametrize("row", [None, packed(0, 5, 28)])
def test_both_mixers_compute_the_same(one_rank, monkeypatch, row):
    x = random(30, 1, 12, seed=20).float()
    expected, _ = mixer()(x, packed_seq_params=row)
    monkeypatch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(mamba_mixer, "causal_conv1d_fn", stand_in)
    monkeypatch.setattr(mamba_mixer, "mamba_split_conv1d_scan_combined", stand_in)
    monkeypatch.setattr(mamba_mixer, "ExtendedRMSNorm", mamba.GroupRMSNorm)
    monkeypatch.setattr(mamba, "has_cuda", lambda: True)
    assert mamba.mixer_class() is mamba.FusedMambaMixer
    found, _ = mixer(mamba.FusedMambaMixer)(x, packed_seq_params=row)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_without_kernels_the_mixer_is_pytorchs():
    assert mamba.mixer_class() is mamba.TorchMambaMixer
