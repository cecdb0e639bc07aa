# SPDX-License-Identifier: Apache-2.0
"""Streams over two ranks: every rank gets every tensor, whatever the layout and the buckets, in bounded memory."""

import time

import pytest
import torch

from megatron.bridge.autotune.vision_tower import LiveBytes
from megatron.bridge.models.conversion.engine.exchange import Pending
from tests.families import harness

BUCKET = 90_000  # a third of a model, and more than its largest parameter needs


def streamed(case, layout, bucket_bytes):
    """Names and bytes as they come, and the peak of live bytes above the model."""
    bridge, model = harness.build(case, layout)
    wait = Pending.wait

    def patiently(arriving):
        found = wait(arriving)
        time.sleep(
            0.005 * bool(arriving.works)
        )  # gloo's threads wake who waits before they let go of tensors
        return found

    Pending.wait = patiently
    try:
        with LiveBytes() as live:
            stream = bridge.export_hf_weights(model, show_progress=False, bucket_bytes=bucket_bytes)
            found = [(name, weight.numpy().tobytes()) for name, weight in stream]
    finally:
        Pending.wait = wait
    return found, live.peak


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama_tied", "tp2"),
        ("llama_tied", "vp2"),
        ("mixtral", "ep2"),
        ("mixtral", "etp2"),
        ("gpt_oss", "ep2"),
    ],
)
def test_every_rank_gets_the_same_from_any_buckets(two_workers, family_case, name, layout):
    case = family_case(name)
    stored = harness.read_weights(case.checkpoint)
    runs = [two_workers.run(streamed, case, layout, size) for size in (1, BUCKET, 1 << 30)]
    streams = [found for run in runs for found, _ in run]
    assert all(found == streams[0] for found in streams)
    values = case.values or stored
    assert {name: len(content) for name, content in streams[0]} == {
        name: value.nbytes for name, value in values.items()
    }
    for tensor, content in streams[0]:
        assert content == values[tensor].contiguous().view(torch.uint8).numpy().tobytes(), tensor


@pytest.mark.parametrize(
    ("name", "layout"), [("llama_tied", "tp2"), ("mixtral", "ep2"), ("llama_tied", "pp2")]
)
def test_a_rank_takes_one_bucket_above_its_part(two_workers, family_case, name, layout):
    case = family_case(name)
    bounded = [peak for _, peak in two_workers.run(streamed, case, layout, BUCKET)]
    free = [peak for _, peak in two_workers.run(streamed, case, layout, 1 << 30)]
    assert BUCKET / 2 < min(bounded) <= max(bounded) <= BUCKET
    assert min(free) > 2 * BUCKET
