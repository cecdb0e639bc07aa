# SPDX-License-Identifier: Apache-2.0
"""The torch backend's attention equals the formula, forward and backward, in every form."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import checkpoint, model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.bridge.backends.attention import block_mask, torch_attention
from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.utils.errors import UserError
from tests.fake_cuda import fake_cuda, fake_mode
from tests.unit_tests.backends import naive

HEADS, GROUPS, WIDTH, BATCH = 4, 2, 8, 2


pytestmark = pytest.mark.usefixtures("one_rank")


def build(
    layer=1,
    mask_type=AttnMaskType.causal,
    softcap=None,
    heads=HEADS,
    groups=GROUPS,
    chunked=False,
    **settings,
):
    torch.manual_seed(3)
    scale = settings.pop("softmax_scale", None)
    channels = {key: settings.pop(key) for key in ("k_channels", "v_channels") if key in settings}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=heads * WIDTH,
        num_attention_heads=heads,
        num_query_groups=groups,
        use_cpu_initialization=True,
        **{"attention_dropout": 0.0, **settings},
    )
    config.attn_logit_softcapping = softcap
    config.chunked_attention = chunked
    return TorchAttention(config, layer, mask_type, "self", softmax_scale=scale, **channels)


def inputs(
    queries=40, keys=None, batch=BATCH, heads=HEADS, groups=GROUPS, values=WIDTH, width=WIDTH
):
    generator = torch.Generator().manual_seed(7)
    shapes = [
        (queries, batch, heads, width),
        *((keys or queries, batch, groups, w) for w in (width, values)),
    ]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_same(module, tensors, actual, expected):
    """Outputs and all gradients agree."""
    leaves = [*tensors, *module.parameters()]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    got = torch.autograd.grad((actual * weight.reshape(actual.shape)).sum(), leaves)
    torch.testing.assert_close(actual, expected.reshape(actual.shape), atol=2e-6, rtol=1e-5)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, (5, 0), (64, 0)])
@pytest.mark.parametrize(
    ("softcap", "sink"),
    [(None, "vanilla"), (2.0, "vanilla"), (None, "learnable"), (2.0, "off-by-one")],
)
def test_causal_forms(groups, window, softcap, sink, monkeypatch):
    """Groups, windows, soft-capping and sinks, in tiles far smaller than the sequence."""
    monkeypatch.setattr(block_mask, "MASKED_ROWS", 16)
    monkeypatch.setattr(torch_attention, "CPU_SCORES", 16 * HEADS * BATCH * 40)
    module = build(
        groups=groups, window_size=window, softcap=softcap, softmax_type=sink, softmax_scale=0.7
    )
    q, k, v = inputs(groups=groups)
    sinks = None if sink == "vanilla" else module.softmax_offset
    expected = naive.attention(
        q,
        k,
        v,
        naive.seen_by_position(40, 40, window=window),
        scale=0.7,
        softcap=softcap,
        sinks=sinks,
    )
    assert_same(module, (q, k, v), module(q, k, v, None), expected)


@pytest.mark.parametrize(
    ("mask_type", "window"),
    [
        (AttnMaskType.no_mask, None),
        (AttnMaskType.no_mask, (3, 4)),
        (AttnMaskType.causal, (3, -1)),
        (AttnMaskType.no_mask, (-1, 2)),
    ],
)
def test_both_directions(mask_type, window):
    module = build(mask_type=mask_type, window_size=window)
    q, k, v = inputs()
    seen = naive.seen_by_position(40, 40, causal=mask_type is AttnMaskType.causal, window=window)
    assert_same(
        module, (q, k, v), module(q, k, v, None), naive.attention(q, k, v, seen, scale=WIDTH**-0.5)
    )


def test_mask_type_of_the_call_wins():
    module = build()
    q, k, v = inputs()
    expected = naive.attention(q, k, v, torch.tensor(True), scale=WIDTH**-0.5)
    actual = module(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(actual, expected.flatten(2))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_fewer_queries_than_keys(softcap, window):
    """Decoding: the queries are the last tokens."""
    module = build(softcap=softcap, window_size=window)
    q, k, v = inputs(queries=3, keys=40)
    seen = naive.seen_by_position(3, 40, window=window)
    expected = naive.attention(q, k, v, seen, scale=WIDTH**-0.5, softcap=softcap)
    assert_same(module, (q, k, v), module(q, k, v, None), expected)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "shape", [(BATCH, 1, 40, 40), (1, 1, 40, 40), (BATCH, 1, 1, 40), (BATCH, HEADS, 40, 40)]
)
def test_arbitrary_mask(shape, softcap, monkeypatch):
    """A mask hides in addition to causality; a query that sees nothing gets zeros and finite gradients."""
    monkeypatch.setattr(block_mask, "MASKED_ROWS", 16)
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    if shape[-2] > 1:
        hidden[0, :, 7] = True
    else:
        hidden[0, :, :, :9] = True  # padding on the left: the first nine queries see nothing
    for mask_type in (AttnMaskType.causal, AttnMaskType.arbitrary):
        module = build(mask_type=mask_type, softcap=softcap)
        q, k, v = inputs()
        seen = ~hidden & naive.seen_by_position(40, 40, causal=mask_type is AttnMaskType.causal)
        expected = naive.attention(q, k, v, seen, scale=WIDTH**-0.5, softcap=softcap)
        assert_same(module, (q, k, v), module(q, k, v, hidden), expected)


@pytest.mark.parametrize("batch", [1, 4])
def test_mask_of_valid_tokens_hides_nothing_from_causal_attention(batch):
    """RL frameworks pass [b, s], true for valid tokens, which Transformer Engine ignores."""
    module = build()
    q, k, v = inputs(batch=batch)
    valid = torch.ones(batch, 40, dtype=torch.bool)
    valid[0, 30:] = False
    expected = naive.attention(q, k, v, naive.seen_by_position(40, 40), scale=WIDTH**-0.5)
    assert_same(module, (q, k, v), module(q, k, v, valid), expected)


def test_mask_of_valid_tokens_with_padding_first_is_refused():
    valid = torch.ones(BATCH, 40, dtype=torch.bool)
    valid[0, :3] = False
    with pytest.raises(UserError, match="put the padding at the end"):
        build()(*inputs(), valid)


def test_mask_of_valid_tokens_needs_causal_attention():
    valid = torch.ones(BATCH, 40, dtype=torch.bool)
    with pytest.raises(UserError, match=r"no_mask.*\[batch, 1, 1, sequence\]"):
        build(mask_type=AttnMaskType.no_mask)(*inputs(), valid)


def test_values_narrower_than_keys():
    """Multi-head latent attention."""
    module = build(k_channels=WIDTH, v_channels=3)
    q, k, v = inputs(values=3)
    expected = naive.attention(q, k, v, naive.seen_by_position(40, 40), scale=WIDTH**-0.5)
    assert_same(module, (q, k, v), module(q, k, v, None), expected)


@pytest.mark.parametrize("chunk", [1, 7, 40, 64])
@pytest.mark.parametrize("queries", [40, 11])
def test_chunks(chunk, queries):
    """Tokens see those before them in their own chunk of positions."""
    module = build(window_size=(chunk - 1, 0), chunked=True)
    q, k, v = inputs(queries=queries, keys=40)
    own = torch.arange(40) // chunk
    seen = naive.seen_by_position(queries, 40) & (own[-queries:, None] == own[None])
    expected = naive.attention(q, k, v, seen, scale=WIDTH**-0.5)
    assert_same(module, (q, k, v), module(q, k, v, None), expected)


@pytest.mark.parametrize("padded", [None, [0, 8, 32, 40]])
@pytest.mark.parametrize(
    ("softcap", "window", "chunked"),
    [
        (None, None, False),
        (None, (4, 0), False),
        (3.0, None, False),
        (3.0, (4, 0), False),
        (None, (4, 0), True),
    ],
)
def test_packed(padded, softcap, window, chunked):
    """Segments do not see each other; padding gets zeros."""
    lengths = [0, 5, 25, 33] if padded else [0, 5, 25, 38]
    rows = torch.zeros(40, dtype=torch.long)  # 0 is padding
    places = torch.zeros(40, dtype=torch.long)
    for index, start in enumerate((padded or lengths)[:-1]):
        length = lengths[index + 1] - lengths[index]
        rows[start : start + length] = index + 1
        places[start : start + length] = torch.arange(length)
    seen = (rows[:, None] == rows[None]) & (rows[:, None] > 0) & (places[None] <= places[:, None])
    if chunked:
        seen &= places[None] // 5 == places[:, None] // 5
    elif window:
        seen &= places[None] >= places[:, None] - window[0]

    def ints(values):
        return torch.tensor(values, dtype=torch.int32) if values else None

    params = PackedSeqParams("thd", ints(lengths), ints(lengths), ints(padded), ints(padded))
    module = build(softcap=softcap, window_size=window, chunked=chunked)
    q, k, v = inputs(batch=1)
    expected = naive.attention(q, k, v, seen, scale=WIDTH**-0.5, softcap=softcap)
    actual = module(q.squeeze(1), k.squeeze(1), v.squeeze(1), None, packed_seq_params=params)
    assert actual.shape == (40, HEADS * WIDTH)
    assert (actual[rows == 0] == 0).all()
    assert_same(module, (q, k, v), actual, expected)


def test_window_only_on_the_layers_that_have_one():
    settings = {"window_size": (2, 0), "window_attn_skip_freq": 2}
    q, k, v = inputs()
    full, windowed = (
        naive.attention(q, k, v, naive.seen_by_position(40, 40, window=w), scale=WIDTH**-0.5)
        for w in (None, (2, 0))
    )
    torch.testing.assert_close(build(layer=1, **settings)(q, k, v, None), windowed.flatten(2))
    torch.testing.assert_close(build(layer=2, **settings)(q, k, v, None), full.flatten(2))


class Largest(TorchDispatchMode):
    """Notes the most elements that one operation's result has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("softcap", "dropout"), [(None, 0.0), (3.0, 0.0), (None, 0.1)])
def test_long_sequences_need_no_square(softcap, dropout, monkeypatch):
    """Nothing of sequence x sequence exists, with a window or without, forward and backward."""
    monkeypatch.setattr(torch_attention, "CPU_SCORES", 2**18)
    tokens = 2048
    for window in (None, (127, 0)):
        module = build(
            softcap=softcap, window_size=window, attention_dropout=dropout, heads=2, groups=1
        )
        q, k, v = inputs(tokens, batch=1, heads=2, groups=1)
        with Largest() as largest:
            module(q, k, v, None).sum().backward()
        assert largest.elements <= tokens * 256


@pytest.mark.parametrize(
    ("groups", "masked", "whole"), [(2, True, True), (2, False, False), (8, True, False)]
)
def test_a_gpu_with_a_mask_gets_a_key_for_each_query_head(groups, masked, whole, monkeypatch):
    """The fused kernels have masks or grouped queries; the formula keeps the scores of all tiles."""
    asked, attend = [], F.scaled_dot_product_attention

    def observed(q, k, v, **options):
        asked.append((k.size(1), options))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", observed)
    kernel = torch_attention._TileAttention(0.5, None, None, 0.0)
    with fake_mode():
        q, k = fake_cuda(1, 8, 16, 4), fake_cuda(1, groups, 16, 4)
        assert (
            kernel(q, k, k, fake_cuda(16, 16) if masked else None, None, not masked).shape
            == q.shape
        )
    ((heads, options),) = asked
    assert heads == (8 if whole else groups)
    assert options["enable_gqa"] == (heads != 8)


def test_tiles_are_larger_on_a_gpu():
    capped = torch_attention._TileAttention(0.5, 30.0, None, 0.0)
    with fake_mode():
        on_gpu = capped.limit(fake_cuda(1, 16, 8192, 64), fake_cuda(1, 4, 8192, 64), masked=False)
    on_cpu = capped.limit(
        *(torch.empty(1, heads, 8192, 64, device="meta") for heads in (16, 4)), masked=False
    )
    assert on_gpu == 4 * on_cpu == 512


def test_tiles_of_a_window_touch_only_what_it_shows():
    """The work is the window's width, not the sequence's length."""
    sight, run = block_mask.AttentionWindow(127, 0), block_mask.whole_sequence(4096, 4096)[0]
    work = sum(length(tile.rows) * length(tile.keys) for tile in block_mask.tiles(run, sight))
    assert work <= 4096 * 2 * 128


def length(part):
    return part.stop - part.start


@pytest.mark.parametrize(("left", "right"), itertools.product((None, 0, 3, 90), repeat=2))
@pytest.mark.parametrize("limit", [None, 7])
def test_tiles_partition_what_is_seen(left, right, limit, monkeypatch):
    """Every visible pair lies in exactly one tile, for runs at any place."""
    monkeypatch.setattr(block_mask, "MASKED_ROWS", 8)
    sight = block_mask.AttentionWindow(left, right)
    for place in ((2, 30, 0, 5, 30), (0, 9, 21, 0, 30), (0, 9, 0, 3, 40)):
        run = block_mask.QuerySpan(*place)
        q = torch.arange(run.rows)[:, None] + run.position
        k = torch.arange(run.keys)[None]
        expected = torch.ones(run.rows, run.keys, dtype=torch.bool)
        if left is not None:
            expected &= k >= q - left
        if right is not None:
            expected &= k <= q + right
        actual = torch.zeros(run.row + run.rows, run.key_row + run.keys, dtype=torch.int)
        for tile in block_mask.tiles(run, sight, limit):
            assert limit is None or length(tile.rows) <= limit
            seen = block_mask.visibility_mask(tile, sight, torch.device("cpu"))
            actual[tile.rows, tile.keys] += 1 if seen is None else seen.int()
        assert torch.equal(actual[run.row :, run.key_row :], expected.int())
        assert actual.sum() == expected.sum()


@pytest.mark.parametrize(
    "sight", [block_mask.AttentionWindow(None, 0), block_mask.AttentionWindow(700, 0)]
)
def test_masks_of_tiles_share_their_memory(sight):
    """Attention keeps them for the backward pass: together they must not be a mask of the whole sequence."""
    run = block_mask.QuerySpan(
        0, 4096, 4096, 0, 8192
    )  # the second chunk of a context parallel rank
    plan = list(block_mask.tiles(run, sight))
    biases = block_mask.tile_biases(plan, sight, torch.ones(1, dtype=torch.bfloat16))
    assert sum(bias is not None for bias in biases) == 8
    for tile, bias in zip(plan, biases, strict=True):
        assert torch.equal(bias == 0, block_mask.visibility_mask(tile, sight, torch.device("cpu")))
    storages = {
        bias.untyped_storage().data_ptr(): bias.untyped_storage().nbytes() for bias in biases
    }
    assert sum(storages.values()) <= 512 * 8192 * 2


def test_parts_taken_give_back_their_gradients():
    whole = torch.randn(1, 2, 10, 3, generator=torch.Generator().manual_seed(1))
    for parts in (
        [slice(0, 10)],
        [slice(0, 4), slice(2, 9)],
        [slice(0, 10)] * 5,
        [slice(3, 5), slice(7, 8)],
    ):
        one, other = whole.clone().requires_grad_(), whole.clone().requires_grad_()
        taken = block_mask.slice_sequence(one, parts)
        weights = [
            torch.randn(part.shape, generator=torch.Generator().manual_seed(2)) for part in taken
        ]
        sum((part * weight).sum() for part, weight in zip(taken, weights, strict=True)).backward()
        slices = [other[:, :, part] for part in parts]
        sum((part * weight).sum() for part, weight in zip(slices, weights, strict=True)).backward()
        assert all(torch.equal(part, plain) for part, plain in zip(taken, slices, strict=True))
        torch.testing.assert_close(one.grad, other.grad)
    first, _ = block_mask.slice_sequence(
        one := whole.clone().requires_grad_(), [slice(0, 4), slice(2, 9)]
    )
    first.sum().backward()  # the other part is not used
    assert one.grad[:, :, :4].eq(1).all()
    assert not one.grad[:, :, 4:].any()


def test_dropout_draws_under_the_tracker():
    """The same model parallel state gives the same mask; the default generator does not move."""
    module = build(attention_dropout=0.3)
    q, k, v = inputs()
    states = torch.get_rng_state()
    model_parallel_cuda_manual_seed(5)
    before = torch.get_rng_state()
    first = module(q, k, v, None)
    assert torch.equal(torch.get_rng_state(), before)
    second = module(q, k, v, None)
    model_parallel_cuda_manual_seed(5)
    again = module(q, k, v, None)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(module.eval()(q, k, v, None), build()(q, k, v, None))
    torch.set_rng_state(states)


def test_dropout_keeps_the_mean():
    module = build(attention_dropout=0.25)
    q, k, v = inputs()
    v = torch.ones_like(v)
    assert module(q, k, v, None).mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_under_dropout_belong_to_the_forward_mask(recompute):
    """With fixed weights the output is linear in v: value and gradient must tell of the same dropout mask."""
    module = build(attention_dropout=0.3)
    q, k, v = inputs()

    def run(value):
        return module(q, k, value, None)

    model_parallel_cuda_manual_seed(11)
    out = checkpoint(run, False, v) if recompute else run(v)
    out.sum().backward()
    assert (v.grad * v).sum().item() == pytest.approx(out.sum().item(), rel=1e-5)


def test_learned_sinks_are_saved_by_head():
    module = build(softmax_type="learnable")
    sharded = module.sharded_state_dict("core_attention.", metadata=None)
    assert list(sharded) == ["core_attention.softmax_offset"]
    assert sharded["core_attention.softmax_offset"].global_shape == (HEADS,)
    assert build().sharded_state_dict("x.", metadata=None) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "softcap", "sink"),
    [(None, None, "vanilla"), ((5, 0), None, "vanilla"), (None, 2.0, "learnable")],
)
def test_on_cuda(dtype, window, softcap, sink):
    module = build(window_size=window, softcap=softcap, softmax_type=sink).cuda().to(dtype)
    tensors = inputs()
    q, k, v = (tensor.detach().cuda().to(dtype) for tensor in tensors)
    sinks = None if sink == "vanilla" else module.softmax_offset.float().cpu()
    expected = naive.attention(
        *(tensor.float().cpu() for tensor in (q, k, v)),
        naive.seen_by_position(40, 40, window=window),
        scale=WIDTH**-0.5,
        softcap=softcap,
        sinks=sinks,
    )
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    actual = module(q, k, v, None).float().cpu()
    torch.testing.assert_close(actual, expected.flatten(2), atol=tolerance, rtol=tolerance)
