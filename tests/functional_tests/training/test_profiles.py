# SPDX-License-Identifier: Apache-2.0
"""Traces of a real run of two ranks, and the one that they are merged into."""

import gzip
import json
import re
from collections import Counter, defaultdict

import pytest

from megatron.bridge.cli import main
from megatron.bridge.training.config import LoggerConfig, ProfilingConfig, ValidationConfig
from megatron.bridge.utils import profiler_traces
from megatron.bridge.utils.errors import UserError
from tests.toy_run import run_toy


def profiled(folder, ranks, **shown):
    run_toy(
        {
            "model": {"tensor_model_parallel_size": 2, "num_layers": 1},
            "train": {"train_iters": 4, "micro_batch_size": 4},
            "validation": ValidationConfig(eval_interval=1, eval_iters=1),
            "logger": LoggerConfig(log_interval=1, log_dir=str(folder)),
            "profiling": ProfilingConfig(
                use_pytorch_profiler=True,
                profile_step_start=1,
                profile_step_end=3,
                profile_ranks=ranks,
                **shown,
            ),
        }
    )


def shapes(folder):
    profiled(folder, [], record_shapes=True)


@pytest.fixture(scope="module")
def run(two_workers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    two_workers.run(shapes, folder)
    return folder


def merged(folder, *options, capsys):
    target = folder / "merged.json.gz"
    code = main.main(["trace", "merge", str(folder), "-o", str(target), *options])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(gzip.decompress(target.read_bytes())), out


def names_of(trace):
    events = trace["traceEvents"]
    return {
        e["pid"]: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "process_name"
    }


def spans(trace, name):
    """(start, end) of the events of a name, in order, by process."""
    names, found = names_of(trace), defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["name"] == name:
            found[names[event["pid"]]].append((event["ts"], event["ts"] + event["dur"]))
    return {process: sorted(places) for process, places in found.items()}


RANKS = ["rank 0 (tp0 pp0 dp0)", "rank 1 (tp1 pp0 dp0)"]


def test_merged_trace_holds_both_ranks(run, capsys):
    trace, out = merged(run, capsys=capsys)
    events = trace["traceEvents"]
    assert f"{len(events):,} events of 2 ranks" in out
    names = names_of(trace)
    assert all(
        isinstance(event["pid"], int) and event["pid"] in names
        for event in events
        if "pid" in event
    )
    assert set(RANKS) <= set(names.values())
    assert len(set(names.values())) == len(names)
    for rank in (0, 1):
        own = profiler_traces.read(run / "traces" / "steps_2-3" / f"rank_{rank}.pt.trace.json.gz")[
            "traceEvents"
        ]
        counts = Counter(names[event["pid"]] for event in events if event["ph"] != "M")
        total = sum(count for name, count in counts.items() if name.startswith(f"rank {rank} "))
        assert total == sum(event["ph"] != "M" for event in own)
    arrows = defaultdict(set)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            arrows[event["id"]].add(names[event["pid"]])
    assert arrows
    assert all(len(processes) == 1 for processes in arrows.values())


def test_phases_of_the_profiled_steps_alone(run, capsys):
    trace, _ = merged(run, capsys=capsys)
    phases = {
        name: spans(trace, name) for name in ("step 2", "step 3", "forward-backward", "optimizer")
    }
    for rank in RANKS:
        steps = [phases["step 2"][rank], phases["step 3"][rank]]
        assert [len(step) for step in steps] == [1, 1]
        assert len(phases["forward-backward"][rank]) == len(phases["optimizer"][rank]) == 2
        for (step,), work, update in zip(
            steps, phases["forward-backward"][rank], phases["optimizer"][rank], strict=True
        ):
            assert step[0] <= work[0] < work[1] <= update[0] < update[1] <= step[1]
    assert not spans(trace, "step 1")
    assert not spans(trace, "step 4")


def test_clocks_are_aligned(run, capsys):
    """No rank leaves an exchange of activations before the other one enters it (to 0.1 ms: PyTorch's clock)."""
    trace, _ = merged(run, capsys=capsys)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["ph"] != "X" or has_activations(e)]
    here, there = (spans(trace, "gloo:all_reduce")[rank] for rank in RANKS)
    assert len(here) == len(there) > 10
    slack = [min(a[1] - b[0], b[1] - a[0]) for a, b in zip(here, there, strict=True)]
    assert min(slack) > -100, slack


def has_activations(event):
    """Sequence, batch, width: other reductions are over groups of one rank, which meet nobody."""
    return any(
        isinstance(shape, list) and len(shape) == 3 for shape in event["args"].get("Input Dims", [])
    )


def test_ranks_can_be_aligned_at_the_barrier(run, tmp_path, capsys):
    """A rank whose clock is an hour fast is brought back."""
    folder = tmp_path / "steps_2-3"
    folder.mkdir()
    for rank in (0, 1):
        trace = profiler_traces.read(run / "traces" / "steps_2-3" / f"rank_{rank}.pt.trace.json.gz")
        trace["baseTimeNanoseconds"] += rank * 3600 * 10**9
        trace[profiler_traces.METADATA_KEY]["met_ns"] += rank * 3600 * 10**9
        (folder / f"rank_{rank}.json").write_text(json.dumps(trace))
    apart, out = merged(folder, capsys=capsys)
    assert float(re.search(r"within ([\d.]+) ms", out)[1]) == pytest.approx(3600e3, abs=1e3)
    assert spans(apart, "step 2")[RANKS[1]][0][0] - spans(apart, "step 2")[RANKS[0]][0][0] > 3e9
    brought, _ = merged(folder, "--clock", "barrier", capsys=capsys)
    starts = [spans(brought, "step 2")[rank][0][0] for rank in RANKS]
    assert abs(starts[0] - starts[1]) < 1e6


def test_one_rank_alone(two_workers, tmp_path, capsys):
    """The others meet it before the first of the profiled steps, and once only."""
    two_workers.run(profiled, tmp_path, [1])
    assert list(profiler_traces.find_traces(tmp_path)) == [1]
    trace, out = merged(tmp_path, capsys=capsys)
    assert "events of rank 1" in out
    assert list(spans(trace, "step 3")) == [RANKS[1]]


def test_traces_that_cannot_be_merged_are_named(run, tmp_path):
    (tmp_path / "traces").mkdir()
    source = run / "traces" / "steps_2-3"
    with pytest.raises(
        UserError, match=r"has no traces \(rank_0.pt.trace.json.gz\): train with profiling"
    ):
        profiler_traces.find_traces(tmp_path)
    first, second = (tmp_path / "traces" / f"rank_{rank}.pt.trace.json.gz" for rank in (0, 1))
    first.write_bytes((source / "rank_0.pt.trace.json.gz").read_bytes())
    target = tmp_path / "merged.json"
    with pytest.raises(UserError, match="no trace of rank 1, which was profiled"):
        profiler_traces.merge(profiler_traces.find_traces(tmp_path), target)
    whole = (source / "rank_1.pt.trace.json.gz").read_bytes()
    for damaged in (whole[: len(whole) // 2], gzip.compress(b'{"traceEvents": []}'), b"x"):
        second.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rank_1.pt.trace.json.gz is not a complete trace"):
            profiler_traces.merge(profiler_traces.find_traces(tmp_path), target)
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"rank_1.pt.trace.json.gz is the trace of rank 0"):
        profiler_traces.merge(profiler_traces.find_traces(tmp_path), target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["traces"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "rank_0.pt.trace.json.gz").write_bytes(whole)
    with pytest.raises(UserError, match="several sets of traces: give one of"):
        profiler_traces.find_traces(tmp_path)
