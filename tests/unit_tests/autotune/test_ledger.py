# SPDX-License-Identifier: Apache-2.0
"""The ledger's errors, against an independent computation from the files of runs."""

import json
import statistics

import pytest

from megatron.bridge.autotune.ledger import LedgerEntry, correction, read_entries, summary
from megatron.bridge.autotune.predict import predict
from megatron.bridge.utils.config.serialize import dump_yaml
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured

STEPS = [9.0, 8.0, 0.30, 0.20, 0.40]


def _write(folder, gpu="NVIDIA H100 80GB HBM3", steps=STEPS):
    folder.mkdir(parents=True)
    config = configured(provider("llama", tensor_model_parallel_size=2, sequence_parallel=True))
    (folder / "run_config.yaml").write_text(dump_yaml(config))
    start = folder / "starts" / "001"
    start.mkdir(parents=True)
    environment = {"processes": 4, "gpu": gpu and {"name": gpu, "count": 4}}
    (start / "environment.json").write_text(json.dumps(environment))
    rows = [
        {"kind": "train", "step": step, "step time": seconds, "peak memory GB": 1.5}
        for step, seconds in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def test_errors_are_those_of_an_independent_computation(tmp_path):
    config = _write(tmp_path / "a" / "run")
    _write(tmp_path / "b", steps=[9.0, 9.0, 0.8])
    first, second = read_entries([tmp_path], None)
    expected = predict(config.resolve(4).config, 4, "H100 80GB").seconds
    assert (first.measured, first.predicted, first.processes) == (0.30, expected, 4)
    assert first.error == expected / 0.30 - 1
    assert (first.measured_memory, first.layout[:3]) == (1.5e9, "TP2")
    assert correction([first, second]) == statistics.median([0.30 / expected, 0.8 / expected])
    assert f"{statistics.median([abs(first.error), abs(second.error)]):.1%}" in summary(
        [first, second]
    )


def test_runs_that_cannot_be_compared_are_named(tmp_path):
    _write(tmp_path / "cpu", gpu=None)
    _write(tmp_path / "short", steps=[1.0, 1.0])
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text(
        (tmp_path / "cpu" / "metrics.jsonl").read_text()
    )
    found = list(read_entries([tmp_path], None))
    assert not any(isinstance(each, LedgerEntry) for each in found)
    assert "run_config.yaml" in found[0]
    assert "--profile" in found[1]
    assert "no steps" in found[2]
    with pytest.raises(UserError, match="--ledger"):
        list(read_entries([tmp_path / "none"], None))
