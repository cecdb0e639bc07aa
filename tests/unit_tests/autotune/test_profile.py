# SPDX-License-Identifier: Apache-2.0
"""Profiles of a machine: measured here, read back, and used in the place of data sheets."""

import json
import math

import pytest

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.measure.layers import time_layers
from megatron.bridge.autotune.measure.machine import measure, merged
from megatron.bridge.autotune.profile import MeasuredKernels, Profile, interpolated, read, write
from megatron.bridge.autotune.time.collectives import CollectiveGroup
from megatron.bridge.autotune.time.work import Cost
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured

SHAPES = [(8, 16, 32), (64, 128, 32)]


def profile(**changes):
    values = {
        "device": "machine",
        "dtype": "float32",
        "memory": 10**9,
        "cores": 2,
        "processes": 4,
        "shapes": [((8, 16, 32), 1e-6), ((64, 128, 32), 1e-4)],
        "kernels": {name: [(1e3, 1e-6), (1e6, 1e-3)] for name in ("forward", "backward", "moved")},
        "messages": {
            f"{kind} of {ranks}": [(1e3, 1e-5 * ranks), (1e6, 1e-3 * ranks)]
            for kind in ("all_gather", "all_reduce", "all_to_all", "send")
            for ranks in (2, 4)
        },
    }
    return Profile(**values | changes)


def test_times_are_those_that_were_measured():
    kernels = MeasuredKernels(gpu("h100"), profile=profile(), world_size=4)
    assert kernels.matrix(8, 16, 32) == 1e-6
    assert kernels.matrix(8, 16, 32, count=3) == pytest.approx(3e-6)
    assert 1e-6 < kernels.matrix(16, 32, 32) < 1e-4
    assert kernels.matrix(128, 128, 32) == pytest.approx(2e-4)
    assert kernels.attention(1e6, "forward", seen=64, head=128) == 1e-3
    assert kernels.crowding == 2.0
    assert MeasuredKernels(gpu("h100"), profile=profile(cores=0), world_size=64).crowding == 1.0


def test_messages_are_those_of_the_nearest_group():
    links = MeasuredKernels(gpu("h100"), profile=profile(), world_size=4).links
    assert links.all_gather(1e6, CollectiveGroup(2)) == pytest.approx(2e-3)
    assert links.all_reduce(1e6, CollectiveGroup(8)) == pytest.approx(4e-3)
    assert links.all_to_all(1e6, CollectiveGroup(1)) == 0.0
    with pytest.raises(UserError, match="torchrun"):
        MeasuredKernels(gpu("h100"), profile=profile(messages={})).links.send(1e6, 1)


def test_times_between_samples_follow_a_power_law():
    samples = [(1.0, 1.0), (100.0, 10.0)]
    assert interpolated(samples, 10.0) == pytest.approx(math.sqrt(10))
    assert interpolated(samples, 0.1) == 1.0
    assert interpolated(samples, 200.0) == 20.0


def test_layers_take_as_long_as_real_ones():
    layers = {"attention forward": [(1e6, 1e-3), (1e8, 1e-1)]}
    kernels = MeasuredKernels(gpu("h100"), profile=profile(layers=layers), world_size=4)
    cost = Cost(matrix=3.0, memory=1.0, tensor=5.0)
    assert kernels.measured("attention forward", 1e7, cost).compute == pytest.approx(1e-2)
    assert kernels.measured("attention forward", 1e7, cost).tensor == 5.0
    assert kernels.measured("experts forward", 1e7, cost) == cost


def test_messages_of_processes_on_cores_overlap_with_nothing():
    assert not MeasuredKernels(gpu("h100"), profile=profile()).overlaps
    assert MeasuredKernels(gpu("h100"), profile=profile(cores=0)).overlaps


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "attention"), ("qwen3_moe", "experts"), ("deepseek_v3", "experts")],
)
def test_real_layers_are_timed(family, kind):
    config = configured(provider(family)).resolve(1).config
    found = time_layers(config, memory=10**10, budget=0.0)
    assert set(found) == {
        f"{name} {direction}" for name in (kind, "ends") for direction in ("forward", "backward")
    }
    assert all(
        amount > 0 and 0 < seconds < 60 for samples in found.values() for amount, seconds in samples
    )
    assert time_layers(config, memory=10**5, budget=0.0) == {}


def test_what_is_measured_is_read_back(tmp_path):
    found = measure(configured(provider("llama")).resolve(1).config, SHAPES, budget=0.01)
    assert found.layers
    assert found.shapes
    assert found.shapes[0][0] in SHAPES
    assert all(seconds > 0 for samples in found.kernels.values() for _, seconds in samples)
    path = tmp_path / "profile.json"
    write(found, path)
    again = read(path)
    assert again.shapes == found.shapes
    assert again.card() == found.card()


def test_the_slowest_rank_gives_the_time_of_a_message():
    slow = profile(messages={"send of 2": [(1e3, 7.0)]})
    assert merged([profile(messages={"send of 2": [(1e3, 3.0)]}), slow]).messages == {
        "send of 2": [(1e3, 7.0)]
    }


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"device": 1}', json.dumps(vars(profile(shapes=[]))), '{"shapes": [1]}']
)
def test_another_file_is_no_profile(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "--measure" in str(caught.value)
