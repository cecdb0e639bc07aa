# SPDX-License-Identifier: Apache-2.0
"""A stream of tensors for another program: the same whatever the buckets, within the memory that was asked for."""

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.vision_tower import LiveBytes
from tests.toy_models import make_llama

HF = {"num_hidden_layers": 3, "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256}


@pytest.fixture(scope="module")
def bridged(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    reference = make_llama(directory, **HF)
    bridge = AutoBridge.from_hf_pretrained(directory)
    return reference, bridge, bridge.to_megatron_model(wrap_with_ddp=False)


def test_live_bytes_are_counted():
    before = torch.ones(1000)
    with LiveBytes() as live:
        kept = before + 1
        view = kept[10:]
        del kept
        assert live.now == 4000
        (before * 2).sum()
        assert (live.now, live.peak) == (4000, 8004)
        del view
        assert live.now == 0


@pytest.mark.parametrize("bucket_bytes", [1, 600_000, 1 << 30])
def test_order_and_bytes_do_not_depend_on_the_buckets(bridged, bucket_bytes):
    reference, bridge, model = bridged
    found = list(bridge.export_hf_weights(model, show_progress=False, bucket_bytes=bucket_bytes))
    tasks = bridge.get_conversion_tasks(model)
    assert [name for name, _ in found] == [name for task in tasks for name in task.mapping.hf_names]
    for name, expected in reference.state_dict().items():
        assert torch.equal(dict(found)[name], expected)
    storages = {weight.untyped_storage().data_ptr() for _, weight in found}
    assert len(storages) == len(found)  # what is kept keeps nothing else alive


def test_a_bucket_is_all_that_a_stream_takes(bridged):
    _, bridge, model = bridged
    peaks = {}
    for bucket_bytes in (600_000, 1 << 30):
        with LiveBytes() as live:
            for name, weight in bridge.export_hf_weights(
                model, show_progress=False, bucket_bytes=bucket_bytes
            ):
                assert weight.numel(), name
        peaks[bucket_bytes] = live.peak
    size = sum(parameter.nbytes for parameter in model[0].parameters())
    assert 300_000 < peaks[600_000] <= 600_000
    assert peaks[1 << 30] >= size  # the count sees what a bucket holds
