# SPDX-License-Identifier: Apache-2.0
"""Predicted times of kernels against published measurements of the same kernels; no test fits a constant."""

import pytest

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.time.collectives import AlphaBeta, CollectiveGroup
from megatron.bridge.autotune.time.kernels import Roofline
from megatron.bridge.autotune.time.layer import layer_time
from megatron.bridge.autotune.time.work import LayerSettings, LayerShape, Matrix

# TFLOP/s of cuDNN's causal attention in bf16, forward and backward, 64 heads of 128 (cudnn-frontend,
# benchmark/sdpa_benchmark_training/results of 2026).
CUDNN = {
    ("H200", 2048): (484, 370),
    ("H200", 4096): (591, 474),
    ("H200", 16384): (673, 579),
    ("GB200", 2048): (1097, 885),
    ("GB200", 4096): (1408, 1148),
    ("GB200", 16384): (1708, 1328),
    ("GB300", 2048): (1373, 967),
    ("GB300", 4096): (1703, 1248),
    ("GB300", 32768): (1953, 1490),
}


@pytest.mark.parametrize(("card", "tokens"), CUDNN)
def test_attention_runs_at_the_rate_of_cudnn(card, tokens):
    for direction, rate in zip(("forward", "backward"), CUDNN[card, tokens], strict=True):
        took = Roofline(gpu(card)).attention(1e12, direction, seen=tokens / 2, head=128)
        assert 1 / took == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    ("card", "rates"), [("H200", (854, 471)), ("GB200", (1805, 1178)), ("GB300", (2532, 1396))]
)
def test_attention_in_fp8_runs_at_the_rate_of_cudnn(card, rates):
    """4,096 tokens in the same results; backward, the rate depends on the length in another way."""
    for direction, rate, tolerance in zip(("forward", "backward"), rates, (0.1, 0.35), strict=True):
        took = Roofline(gpu(card), "fp8", fp8_attention=True).attention(
            1e12, direction, seen=2048, head=128
        )
        assert 1 / took == pytest.approx(rate, rel=tolerance)


def test_windows_of_narrow_heads_are_slower_than_their_operations():
    """A window of 128 on GB300 in the same results: 2 x 128 heads of 64 and 4,096 tokens."""
    kernels, seen = Roofline(gpu("GB300")), 128 - 128 * 127 / (2 * 4096)
    operations = 4.0 * 64 * seen * 4096 * 256
    layer = kernels.attention(operations, "forward", seen, 64) + kernels.attention(
        2.5 * operations, "backward", seen, 64
    )
    assert layer == pytest.approx(0.202e-3 + 0.442e-3, rel=0.15)


def test_attention_of_a_step_on_an_h100():
    """Llama 3.2 1B, 4 x 4,096 tokens: 45.6 ms of this project's profile on an H100 (docs/performance.md)."""
    kernels, operations = Roofline(gpu("H100 80GB")), 4.0 * 64 * 2048 * 32 * 4 * 4096
    layer = kernels.attention(operations, "forward", 2048, 64) + kernels.attention(
        2.5 * operations, "backward", 2048, 64
    )
    assert 16 * layer == pytest.approx(45.6e-3, rel=0.1)


@pytest.mark.parametrize(("inner", "part"), [(2048, 0.91), (1536, 0.89), (512, 0.59)])
def test_products_with_a_short_inner_dimension_are_slower(inner, part):
    """DeepGEMM's README of 2025-04, 4,096 tokens in FP8, against an inner dimension of 7,168."""
    kernels = Roofline(gpu("H100 80GB"), "fp8")
    rates = [4096 * 8192 * each / kernels.matrix(4096, 8192, each) for each in (inner, 7168)]
    assert rates[0] / rates[1] == pytest.approx(part, rel=0.1)


@pytest.mark.parametrize(("tokens", "part"), [(256, 0.72), (512, 0.80), (1024, 0.88)])
def test_experts_with_few_tokens_are_slower(tokens, part):
    """DeepGEMM's README of 2025-04, against 4,096 tokens; as many tokens of all experts."""
    kernels = Roofline(gpu("H100 80GB"), "fp8")
    few, many = (kernels.matrix(each, 7168, 4096, count=32768 // each) for each in (tokens, 4096))
    assert many / few == pytest.approx(part, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "milliseconds"),
    [
        (1024, 2048, 6144, 1.54),
        (1024, 6144, 2048, 1.43),
        (2048, 2048, 6144, 2.64),
        (2048, 6144, 2048, 2.67),
    ],
)
def test_products_of_experts_take_as_long_as_on_an_h200(tokens, rows, columns, milliseconds):
    """32 experts in bf16, one product of cuBLAS after the other (PyTorch issue 163425), which no constant is from."""
    took = Roofline(gpu("H200")).matrix(tokens, rows, columns, count=32)
    assert took * 1e3 == pytest.approx(milliseconds, rel=0.1)


def test_quantization_to_mxfp8_takes_as_long_as_on_a_b300():
    """Transformer Engine's tutorial on profiling products: 1.82 ms for 2.48e9 numbers, the difference of two tables."""
    matrices = (Matrix("linear_fc1", rows=16384, columns=16384),)
    nothing = {"norms": 0, "inner": 0, "blocks": 0, "keys": 0, "weights": 0, "expert_weights": 0}
    shape = LayerShape(matrices, (), (), between=0.0, scan_bytes=0.0, quadratic=False, **nothing)
    run, card = LayerSettings(tokens=16384, hidden=0), gpu("B300")
    fp8, bf16 = (
        layer_time(shape, run, Roofline(card, precision)).forward.memory
        for precision in ("fp8", "bf16")
    )
    assert (fp8 - bf16) / (16384 * 16384) == pytest.approx(1.82e-3 / 2.48e9, rel=0.1)


# GB/s of HybridEP's kernels for 4,096 tokens of 7,168 numbers and 8 experts each: dispatch in bf16 and in FP8, combine
# (docs/README_Hybrid-EP.md of DeepEP's branch hybrid-ep). A token counts once for each rank, or node, that it goes to.
HYBRID_EP = {
    ("GB200", 8): (764, 714, 737),
    ("GB200", 16): (707, 650, 666),
    ("GB200", 32): (642, 539, 605),
    ("H100", 32): (57.7, 55.4, 57.5),
    ("H100", 64): (50.0, 46.5, 49.8),
}


@pytest.mark.parametrize(("card", "ranks"), HYBRID_EP)
def test_flex_dispatchers_run_at_the_rate_of_hybridep(card, ranks):
    links = AlphaBeta(gpu(card))
    places = ranks if card == "GB200" else ranks // 8
    copies = 4096 * places * (1 - (1 - 1 / places) ** 8)
    for number, rate in zip((2, 1, 2), HYBRID_EP[card, ranks], strict=True):
        took = links.dispatch(4096, 7168 * number, 8, CollectiveGroup(ranks))
        assert copies * 7168 * number / took / 1e9 == pytest.approx(rate, rel=0.15)


def test_flex_dispatchers_send_a_token_once_to_a_node():
    links, width = AlphaBeta(gpu("H100 80GB")), 7168 * 2
    assert (
        links.dispatch(4096, width, 8, CollectiveGroup(64))
        < links.all_to_all(8 * 4096 * width, CollectiveGroup(64)) / 1.2
    )
    assert links.dispatch(4096, width, 8, CollectiveGroup(1)) == 0.0


def test_narrow_tokens_cost_more_than_their_bytes():
    links = AlphaBeta(gpu("B200"))
    wide, narrow = (links.dispatch(4096, width, 8, CollectiveGroup(64)) for width in (14336, 2048))
    assert narrow > wide / 7 * 1.3


def test_products_run_at_the_rate_of_a_b200():
    """vLLM's benchmarks of products (pull requests 19566 and 20646), 16,384 tokens, N=6144, K=4096."""
    for precision, rate in (("bf16", 1437), ("fp8", 2545), ("fp4", 3904)):
        took = Roofline(gpu("B200"), precision).matrix(16384, 6144, 4096)
        assert 2 * 16384 * 6144 * 4096 / took / 1e12 == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize(("tokens", "rate"), [(4096, 628), (2048, 554)])
def test_products_of_experts_run_at_the_rate_of_transformer_engine(tokens, rate):
    """Transformer Engine's grouped products on an H100 in bf16 (pull request 2045), which no constant is from."""
    took = Roofline(gpu("H100 80GB")).matrix(tokens, 768, 2048, count=32768 // tokens)
    assert 2 * 32768 * 768 * 2048 / took / 1e12 == pytest.approx(rate, rel=0.1)


def test_the_slowest_of_many_gpus_decides():
    kernels = Roofline(gpu("H100 80GB"))
    assert kernels.slowest(1) == 1.0
    assert kernels.slowest(8) < kernels.slowest(256) == kernels.slowest(16384) == 1.04
