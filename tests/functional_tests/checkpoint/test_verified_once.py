# SPDX-License-Identifier: Apache-2.0
"""What a run reads is verified once, before the model is built, as thoroughly as ``checkpoint.verify`` says."""

import shutil
import sys
from pathlib import Path

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.peft.lora import LoRA
from tests.functional_tests.checkpoint.runs import run_to
from tests.functional_tests.checkpoint.test_bad_input import flip_bit

WIDE = {
    "num_layers": 1,
    "ffn_hidden_size": 4096,
}  # shards of more than the 1 MB that a fast verification reads in full
_opened: list[str] = []


def _note_opened(event, args):
    if event == "open" and str(args[0]).endswith(".distcp"):
        _opened.append(str(args[0]))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Weights that a run saved."""
    sys.addaudithook(_note_opened)
    root = tmp_path_factory.mktemp("base") / "run"
    run_to(root, 1, {"model": WIDE})
    return root


@pytest.fixture
def damaged(base, tmp_path):
    root = shutil.copytree(base, tmp_path / "damaged")
    shard = _largest(root)
    flip_bit(shard, shard.stat().st_size // 2)
    return root


def _largest(root: Path):
    return max(paths.resolve(root).glob("*.distcp"), key=lambda path: path.stat().st_size)


def _options(mode, method=None, **checkpoint):
    return {"model": WIDE, "checkpoint": {"verify": mode, **checkpoint}, "peft": method}


METHODS = pytest.mark.parametrize("method", [None, LoRA(dim=2)], ids=["all weights", "adapters"])


@METHODS
def test_fast_is_fast(damaged, method, run_in_process):
    """One bit differs in a large file: only a full verification can find that."""
    run_to(None, 1, _options("fast", method), pretrained=str(damaged))
    with pytest.raises(DamagedError, match=f"{_largest(damaged).name} is not what was written"):
        run_to(None, 1, _options("full", method), pretrained=str(damaged))


@METHODS
def test_full_reads_the_checkpoint_once_more_than_fast(base, method, run_in_process):
    counts = {}
    for mode in ("fast", "full"):
        _opened.clear()
        run_to(None, 1, _options(mode, method), pretrained=str(base))
        counts[mode] = _opened.count(str(_largest(base)))
    assert counts["full"] == counts["fast"] + 1


def test_the_base_of_adapters_is_verified_when_a_run_resumes(
    base, damaged, tmp_path, run_in_process
):
    run_to(tmp_path / "run", 1, _options("full", LoRA(dim=2)), pretrained=str(base))
    with pytest.raises(DamagedError, match="is not what was written"):
        run_to(tmp_path / "run", 2, _options("full", LoRA(dim=2)), pretrained=str(damaged))
    assert run_to(tmp_path / "run", 2, _options("full", LoRA(dim=2)), pretrained=str(base))[
        "losses"
    ].keys() == {1, 2}


def test_other_adapters_to_start_from_are_verified_as_told(base, tmp_path, run_in_process):
    wide = LoRA(dim=512)
    run_to(tmp_path / "first", 1, _options("full", wide), pretrained=str(base))
    shard = _largest(tmp_path / "first")
    flip_bit(shard, shard.stat().st_size // 2)
    load = str(tmp_path / "first")
    run_to(None, 1, _options("fast", wide, finetune=True), str(base), load)
    with pytest.raises(DamagedError, match=f"{shard.name} is not what was written"):
        run_to(None, 1, _options("full", wide, finetune=True), str(base), load)
