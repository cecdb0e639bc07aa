# SPDX-License-Identifier: Apache-2.0
"""Communication that computation hides, against a grid of microseconds."""

import gzip
import json
import random

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.utils.profiler_overlap import analyze
from megatron.bridge.utils.profiler_traces import trace_name

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KERNELS = {
    ALL_REDUCE: "all_reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_receive",
    "void deep_ep::intranode::dispatch<8, 768>(int4*)": "void deep_ep::intranode::dispatch<8, 768>",
}
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"


def event(category, name, start, duration, tid=1, **arguments):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": tid,
        "args": arguments,
    }


def kernel(name, start, duration, **arguments):
    return event("kernel", name, start, duration, tid=7, **arguments)


def step(number, start, duration):
    return event("user_annotation", f"step {number}", start, duration)


def write_trace(path, events):
    content = {"baseTimeNanoseconds": 0, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


def test_the_parts_are_those_of_a_grid():
    chosen = random.Random(0)
    names = [*KERNELS, GEMM, GEMM]
    events = [
        kernel(chosen.choice(names), chosen.randrange(900), chosen.randrange(1, 90))
        for _ in range(40)
    ]
    computing, communicating = set(), set()
    for each in events:
        grid = computing if each["name"] == GEMM else communicating
        grid.update(range(each["ts"], each["ts"] + each["dur"]))
    end = max(computing | communicating | {999}) + 1
    overlap = analyze([step(2, 0, 500), step(3, 500, 500), *events])
    assert overlap.seconds == pytest.approx(end / 1e6)
    assert overlap.computing == pytest.approx(len(computing) / 1e6)
    assert overlap.communicating == pytest.approx(len(communicating) / 1e6)
    assert overlap.hidden == pytest.approx(len(computing & communicating) / 1e6)
    assert overlap.exposed == pytest.approx(len(communicating - computing) / 1e6)
    assert overlap.idle == pytest.approx((end - len(computing | communicating)) / 1e6)
    assert {kind.kind for kind in overlap.kinds} == set(KERNELS.values())


def test_the_bytes_of_a_message_are_its_larger_side():
    arguments = {
        "Collective name": "_allgather_base",
        "In msg nelems": 100,
        "Out msg nelems": 800,
        "dtype": "BFloat16",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
    }
    events = [step(1, 0, 100), kernel(ALL_REDUCE, 10, 20, **arguments), kernel(GEMM, 20, 30)]
    (kind,) = analyze(events).kinds
    assert (kind.kind, kind.group) == ("all_gather", "TENSOR_MODEL_PARALLEL_GROUP")
    assert (kind.count, kind.size) == (1, 1600)
    assert (kind.seconds, kind.exposed) == pytest.approx((20e-6, 10e-6))


def test_an_operator_that_waits_for_gloo_does_not_compute():
    events = [
        step(1, 0, 100),
        event("cpu_op", "ReduceFromModelParallelRegion", 0, 60),
        event("cpu_op", "c10d::allreduce_", 5, 2),
        event("cpu_op", "aten::mm", 60, 30),
        event("cpu_op", "aten::add_", 12, 4, tid=9),  # gloo's own, on its thread
        event("user_annotation", "gloo:all_reduce", 10, 60, tid=9),
    ]
    overlap = analyze(events)
    assert overlap.computing == pytest.approx(30e-6)
    assert (overlap.communicating, overlap.hidden) == pytest.approx((60e-6, 10e-6))


def test_the_command_prints_a_row_for_each_rank_and_writes_a_page(tmp_path, capsys):
    for rank in (0, 1):
        events = [step(2, 0, 100), kernel(ALL_REDUCE, 10, 40), kernel(GEMM, 30, 60)]
        write_trace(tmp_path / trace_name(rank), events)
    page = tmp_path / "overlap.html"
    assert main(["trace", "overlap", str(tmp_path), "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert lines[1].split()[-5:] == ["60%", "40%", "50%", "20%", "20%"]
    assert page.read_text().count("<h3>rank") == 2


def test_a_trace_without_work_is_refused(tmp_path, capsys):
    write_trace(tmp_path / trace_name(0), [step(1, 0, 100)])
    assert main(["trace", "overlap", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert trace_name(0) in error
    assert "profiling.use_pytorch_profiler=true" in error
