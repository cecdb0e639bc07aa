# SPDX-License-Identifier: Apache-2.0
"""Traces have the names by which other tools find them."""

import re

from megatron.bridge.utils.profiler_traces import find_traces, trace_name

# of torch_tb_profiler.consts, which lists the workers of a run
TENSORBOARD = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def test_tensorboard_lists_each_rank():
    workers = [TENSORBOARD.fullmatch(trace_name(rank))[1] for rank in (0, 13)]
    assert workers == ["rank_0", "rank_13"]


def test_traces_of_earlier_versions_are_merged(tmp_path):
    paths = {0: tmp_path / "rank_0.json.gz", 1: tmp_path / trace_name(1)}
    for path in paths.values():
        path.touch()
    assert find_traces(tmp_path) == paths
