# SPDX-License-Identifier: Apache-2.0
"""Conversion without the model in memory: over several ranks, and killed in the middle."""

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import loading
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.models.conversion.engine import streaming
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.functional_tests.models import killed

KILLED = -9


def sizes(layout):
    return {name: value for name, value in harness.LAYOUTS[layout].items() if "p2p" not in name}


def import_both_ways(case, layout, folder):
    """A checkpoint of the model in memory, and one without it."""
    bridge, model = harness.build(case, layout)
    bridge.save_megatron_model(model, folder / "whole")
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in harness.settings(
        provider, harness.LAYOUTS[layout], case.row.provider
    ).items():
        setattr(provider, name, value)
    bridge.save_megatron_checkpoint(provider, folder / "streamed", show_progress=False)


def export(case, layout, folder, breaks_on=None):
    """Export what was imported; the message of the error, if there is one."""
    bridge, read, device = (
        AutoBridge.from_hf_pretrained(case.checkpoint),
        loading.read,
        torch.cuda.current_device,
    )
    try:
        torch.cuda.current_device = in_main_thread(device)
        streaming.AHEAD = 10_000  # many reads
        if distributed.rank() == breaks_on:
            loading.read = broken
        bridge.export_ckpt(
            folder / "streamed", folder / "out", show_progress=False, mp_overrides=sizes(layout)
        )
    except UserError as error:
        return str(error)
    finally:
        streaming.AHEAD, loading.read, torch.cuda.current_device = 512 << 20, read, device
    return None


def in_main_thread(function):
    """CUDA's device is a thread's own: the first GPU in a new thread, whichever this rank's is."""

    def checked():
        assert threading.current_thread() is threading.main_thread(), "a thread asks for its device"
        return function()

    return checked


def broken(state, directory):
    raise DamagedError.of(directory, f"{len(state)} tensors are gone")


def contents(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*.distcp")
    }


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("llama_tied", "tp2", "vp2"),
        ("mixtral", "ep2", "etp2"),
        ("gpt_oss", "tp2", "ep2"),
        ("gemma2", "pp2", "tp2"),
    ],
)
def test_ranks_write_the_same_files_and_export_from_any_layout(
    two_workers, family_case, tmp_path, name, first, second
):
    case = family_case(name)
    two_workers.run(import_both_ways, case, first, tmp_path)
    assert len(contents(tmp_path / "whole")) == 2
    assert contents(tmp_path / "whole") == contents(tmp_path / "streamed")
    assert two_workers.run(export, case, second, tmp_path) == [None, None]
    problems = harness.different_files(case, tmp_path / "out")
    assert [line for line in problems if "config.json" not in line] == []


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_rank_that_cannot_read_stops_all(two_workers, family_case, tmp_path, layout):
    case = family_case("llama_tied")
    AutoBridge.import_ckpt(case.checkpoint, tmp_path / "streamed", show_progress=False)
    for message in two_workers.run(export, case, layout, tmp_path, 1):
        assert "tensors are gone" in message
    assert [path.name for path in tmp_path.iterdir()] == ["streamed"]


def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_can_be_run_again(tmp_path):
    command = [sys.executable, "-m", killed.__name__, str(tmp_path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["import"] == [[KILLED, [], False]] * len(killed.IMPORTS)
    assert found["export"] == [[KILLED, False, True]] * len(
        killed.EXPORTS
    )  # what was begun has another name
    assert (found["import again"], found["export again"]) == (0, 0)
    assert found["import equal"]
    assert found["export equal"]
    assert found["left"] == ["hf", "megatron", "out", "reference"]
