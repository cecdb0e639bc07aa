# SPDX-License-Identifier: Apache-2.0
"""Attention split over context parallel ranks equals attention in one process, forward and backward."""

import itertools

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.attention.torch_attention import TorchAttention
from tests.unit_tests.backends import naive

TOKENS, HEADS, GROUPS, WIDTH = 32, 8, 2, 8
PACKED = (
    [0, 7, 20, 25],
    [0, 8, 24, 32],
)  # real and padded lengths, padded to multiples of 2 * size


def zigzag(whole, rank, size, bounds=(0, TOKENS)):
    """The rows that Megatron gives to a rank, segment by segment."""
    rows = []
    for start, stop in itertools.pairwise(bounds):
        chunks = whole[start:stop].chunk(2 * size)
        rows += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(rows)


def build(size, kind, window, softcap, sink, chunked, dropout=0.0):
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        use_cpu_initialization=True,
        attention_dropout=dropout,
        context_parallel_size=size,
        hierarchical_context_parallel_sizes=[2, size // 2]
        if kind == "a2a+p2p" and size > 2
        else None,
        window_size=window,
        softmax_type=sink,
    )
    config.attn_logit_softcapping = softcap
    config.chunked_attention = chunked
    return TorchAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=kind)


def compare(kind, window, softcap, sink, packed, hidden, chunked=False):
    """Largest differences of this rank's output, input gradients and (summed) sink gradient."""
    size, rank = dist.get_world_size(), dist.get_rank()
    levels = [2, size // 2] if kind == "a2a+p2p" else None
    parallel_state.initialize_model_parallel(
        context_parallel_size=size, hierarchical_context_parallel_sizes=levels
    )
    model_parallel_cuda_manual_seed(1)
    module = build(size, kind, window, softcap, sink, chunked)
    generator = torch.Generator().manual_seed(7)
    batch = 1 if packed else 2
    whole = [
        torch.randn(TOKENS, batch, heads, WIDTH, generator=generator)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    weight = torch.randn(TOKENS, batch, HEADS * WIDTH, generator=generator)
    bounds, params, seen = (0, TOKENS), None, naive.seen_by_position(TOKENS, TOKENS, window=window)
    if chunked:
        own = torch.arange(TOKENS) // (window[0] + 1)
        seen = seen & (own[:, None] == own[None])
    mask = torch.rand(TOKENS, TOKENS, generator=generator) < 0.3 if hidden else None
    if packed:
        real, bounds = PACKED
        tensors = [torch.tensor(values, dtype=torch.int32) for values in PACKED]
        params = PackedSeqParams("thd", tensors[0], tensors[0], tensors[1], tensors[1])
        label = torch.zeros(TOKENS)
        for index, start in enumerate(bounds[:-1]):
            label[start : start + real[index + 1] - real[index]] = index + 1
        seen = seen & (label[:, None] == label[None]) & (label[:, None] > 0)
    if mask is not None:
        seen = seen & ~mask

    reference = [tensor.clone().requires_grad_() for tensor in whole]
    sinks = (
        None
        if module.softmax_offset is None
        else module.softmax_offset.detach().clone().requires_grad_()
    )
    expected = naive.attention(
        *reference, seen, scale=WIDTH**-0.5, softcap=softcap, sinks=sinks
    ).flatten(2)
    (expected * weight).sum().backward()

    local = [zigzag(tensor, rank, size, bounds).requires_grad_() for tensor in whole]
    given = [tensor.squeeze(1) for tensor in local] if packed else local
    rows = None if mask is None else zigzag(mask, rank, size)[None, None]
    actual = module(*given, rows, packed_seq_params=params)
    actual = actual.unsqueeze(1) if packed else actual
    (actual * zigzag(weight, rank, size, bounds)).sum().backward()

    pairs = [(actual, zigzag(expected, rank, size, bounds))]
    pairs += [
        (mine.grad, zigzag(other.grad, rank, size, bounds))
        for mine, other in zip(local, reference, strict=True)
    ]
    if sinks is not None and sinks.requires_grad and sink == "learnable":
        dist.all_reduce(module.softmax_offset.grad)
        pairs.append((module.softmax_offset.grad, sinks.grad))
    parallel_state.destroy_model_parallel()
    return [(one - other).abs().max().item() for one, other in pairs]


FORMS = [
    pytest.param(None, None, "vanilla", False, False, id="causal"),
    pytest.param((5, 0), None, "vanilla", False, False, id="window"),
    pytest.param(None, 2.0, "learnable", False, False, id="softcap-sinks"),
    pytest.param(None, None, "vanilla", True, False, id="packed"),
    pytest.param((3, 0), 2.0, "learnable", True, False, id="packed-window-softcap-sinks"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["all_gather", "a2a", "p2p"])
@pytest.mark.parametrize(("window", "softcap", "sink", "packed", "hidden"), FORMS)
def test_two_ranks(two_workers, kind, window, softcap, sink, packed, hidden):
    for differences in two_workers.run(compare, kind, window, softcap, sink, packed, hidden):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("kind", ["all_gather", "a2a", "p2p"])
def test_chunks(two_workers, kind):
    for differences in two_workers.run(compare, kind, (5, 0), None, "vanilla", False, False, True):
        assert max(differences) < 1e-5


def test_mask_with_local_rows_and_all_columns(two_workers):
    for differences in two_workers.run(compare, "all_gather", None, None, "vanilla", False, True):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("kind", ["all_gather", "a2a", "p2p", "a2a+p2p"])
def test_four_ranks_with_fewer_key_heads_than_ranks(four_workers, kind):
    for packed in (False, True):
        for differences in four_workers.run(compare, kind, None, None, "learnable", packed, False):
            assert max(differences) < 1e-5


def refusals():
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    messages = []
    for act in (dropping_ring, one_level, masked):
        try:
            act()
        except ValueError as error:
            messages.append(str(error))
    return messages


def dropping_ring():
    build(2, "p2p", None, None, "vanilla", False, dropout=0.1)


def one_level():
    build(2, "a2a+p2p", None, None, "vanilla", False)


def masked():
    q, k, v = (torch.randn(4, 1, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    build(2, "a2a", None, None, "vanilla", False)(q, k, v, torch.ones(1, 1, 4, 8, dtype=torch.bool))


def test_what_is_not_there_is_refused(two_workers):
    for messages in two_workers.run(refusals):
        assert len(messages) == 3
        assert "attention_dropout=0.1 with cp_comm_type='p2p'" in messages[0]
        assert "needs hierarchical_context_parallel_sizes" in messages[1]
        assert "'a2a' cannot split an attention mask" in messages[2]
