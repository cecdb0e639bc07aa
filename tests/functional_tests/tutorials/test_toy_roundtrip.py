# SPDX-License-Identifier: Apache-2.0
"""examples/models/toy_roundtrip.py on every toy beside it."""

import argparse
import json
import runpy

import pytest

from tests.unit_tests.project.tree import ROOT

SCRIPT = ROOT / "examples/models/toy_roundtrip.py"
TOYS = {path.stem: path for path in sorted((ROOT / "examples/models").glob("*/*.json"))}
IN_CI = {"llama": "pp", "qwen3_moe": "ep", "nemotron_h": "tp"}  # dense, experts, hybrid


def go_round(toy, dimension, out):
    """On every rank of a pool: the script without its options and without its process group."""
    from megatron.bridge.cli.support import model_options

    script = runpy.run_path(str(SCRIPT))
    script["logging"].disable_progress_bar()
    sizes = {"tp": 1, "pp": 1, "vp": None, "ep": 1, "etp": None} | {dimension: 2}
    if dimension == "tp" and toy.stem == "gpt_oss":
        sizes["etp"] = 1  # its experts have biases, and are refused to be cut
    script["circle"](
        json.loads(toy.read_text()), model_options.parallel_sizes(argparse.Namespace(**sizes)), out
    )


def proven(toy, dimension, workers, out):
    """The script's own assertions hold on every rank; and what transformers loaded is there."""
    workers.run(go_round, TOYS[toy], dimension, out)
    before, after = ((out / name / "config.json").read_text() for name in ("hf", "exported"))
    assert json.loads(after) == json.loads(before)
    losses = [
        json.loads(line)["lm loss"] for line in (out / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 2


@pytest.mark.parametrize(("toy", "dimension"), IN_CI.items())
def test_circle(toy, dimension, two_workers, tmp_path):
    proven(toy, dimension, two_workers, tmp_path)


def others():
    """Every toy under every dimension that it has."""
    for name, path in TOYS.items():
        experts = any("experts" in key for key in json.loads(path.read_text()))
        for dimension in ("tp", "pp", *(["ep"] if experts else [])):
            if IN_CI.get(name) != dimension:
                yield name, dimension


@pytest.mark.slow
@pytest.mark.parametrize(("toy", "dimension"), others())
def test_other_circles(toy, dimension, two_workers, tmp_path):
    proven(toy, dimension, two_workers, tmp_path)


def test_a_circle_that_learns_nothing_is_found(two_workers, tmp_path):
    """The script would see it: its check fails on a run whose export is its source."""
    assert two_workers.run(without_steps, TOYS["llama"], tmp_path) == ["nothing was learned"] * 2


def without_steps(toy, out):
    from megatron.bridge import AutoBridge

    script = runpy.run_path(str(SCRIPT))
    script["STEPS"] = 0
    from megatron.bridge.utils import distributed

    if distributed.rank() == 0:
        script["make"](json.loads(toy.read_text()), out / "hf")
        script["make"](json.loads(toy.read_text()), out / "exported")
    distributed.barrier()
    model = AutoBridge.from_hf_pretrained(out / "hf").to_megatron_model(wrap_with_ddp=False)
    run = argparse.Namespace(
        model=model, config=argparse.Namespace(model=argparse.Namespace(vocab_size=256))
    )
    try:
        script["check"](run, out)
    except AssertionError as error:
        return str(error)
    return "learnt"
