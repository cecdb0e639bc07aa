# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between the persistent ones: used when they surely fit, left with a sentence when they do not."""

import shutil
from pathlib import Path

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import DistributedInitConfig, OptimizerConfig
from megatron.bridge.utils.console import console
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to

LAYOUTS = {
    "dp2_bf16": {
        "mixed_precision": "bf16_mixed",
        "ddp": {"use_distributed_optimizer": True},
        "model": DROPOUT,
    },
    "tp2_fp16": {
        "model": {**DROPOUT, "tensor_model_parallel_size": 2},
        "mixed_precision": "fp16_mixed",
        "optimizer": OptimizerConfig(
            lr=1e-2, clip_grad=0.5, initial_loss_scale=1024, loss_scale_window=2
        ),
    },
}
DP2 = LAYOUTS["dp2_bf16"]
LAYOUTS["fsdp2_bf16"] = {**DP2, "ddp": {}, "dist": DistributedInitConfig(use_torch_fsdp2=True)}
LAYOUTS["megatron_fsdp_bf16"] = {**DP2, "ddp": {"use_megatron_fsdp": True}}


class Fails(Callback):
    """Ends a run before step ``stop`` + 1, without a save."""

    def __init__(self, stop):
        self.stop = stop

    def on_train_step_start(self, context):
        if context.progress.step == self.stop:
            raise RuntimeError("the run is broken off")


def _options(arguments, folder, kind="local", interval=3):
    saving = {
        "save_interval": interval,
        "non_persistent_save_interval": 1,
        "non_persistent_ckpt_type": kind,
    }
    if kind == "local":
        saving["non_persistent_local_ckpt_dir"] = str(folder / "local")
    return {**arguments, "checkpoint": saving}


def broken_off(folder, arguments, stop=5, options=()):
    """A run that fails after step ``stop``."""
    with pytest.raises(RuntimeError, match="broken off"):
        run_to(
            folder / "run",
            STEPS,
            {**_options(arguments, folder, **dict(options)), "extra": [Fails(stop)]},
        )


def went_on(folder, arguments, options=()):
    """A run to its end from where it stands, and what it said."""
    with console().capture() as capture:
        result = run_to(folder / "run", STEPS, _options(arguments, folder, **dict(options)))
    return result, " ".join(capture.get().split())


def _parts(folder):
    return sorted((folder / "local").rglob("state.pt"))


def _same(results, undisturbed):
    return [result for result, _ in results] == undisturbed


@pytest.fixture(scope="module")
def undisturbed(two_workers):
    """Results of undisturbed runs by layout."""
    results = {}

    def of(name):
        if name not in results:
            results[name] = two_workers.run(run_to, None, STEPS, LAYOUTS[name])
        return results[name]

    return of


@pytest.mark.parametrize("kind", ["local", "global"])
@pytest.mark.parametrize(
    "name",
    ["dp2_bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])],
)
def test_a_run_goes_on_from_it_bit_for_bit(two_workers, tmp_path, undisturbed, name, kind):
    two_workers.run(broken_off, tmp_path, LAYOUTS[name], 5, {"kind": kind})
    assert paths.published_iterations(tmp_path / "run") == [3]
    kept = [path for path in tmp_path.rglob("iter_*") if path.parent != tmp_path / "run"]
    assert {path.name for path in kept} == {"iter_0000005"}, "only the newest is kept"
    results = two_workers.run(went_on, tmp_path, LAYOUTS[name], {"kind": kind})
    assert "iter_0000005 at step 5" in results[0][1]
    assert _same(results, undisturbed(name))
    assert paths.latest_iteration(tmp_path / "run") == STEPS
    assert not [path for path in tmp_path.rglob("iter_*") if path.parent != tmp_path / "run"], (
        "the run has ended"
    )


def _lost(folder):
    shutil.rmtree(_parts(folder)[1].parent)


def _flipped(folder):
    content = bytearray(_parts(folder)[1].read_bytes())
    content[len(content) // 2] ^= 4
    _parts(folder)[1].write_bytes(content)


def _swapped(folder):
    first, second = _parts(folder)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _of_an_older_one(folder):
    paths.write_tracker(folder / "run", 2)


@pytest.mark.parametrize(
    ("what", "words", "interval", "step"),
    [
        (_lost, "rank 1 on", 3, 3),
        (_flipped, "the content of state.pt is not what was written", 3, 3),
        pytest.param(_swapped, "state.pt", 3, 3, marks=pytest.mark.slow),
        (_of_an_older_one, "it follows iteration 4, but the run resumes from 2", 2, 2),
    ],
)
def test_what_does_not_fit_is_left(two_workers, tmp_path, undisturbed, what, words, interval, step):
    two_workers.run(broken_off, tmp_path, DP2, 5, {"interval": interval})
    what(tmp_path)
    results = two_workers.run(went_on, tmp_path, DP2, {"interval": interval})
    said = results[0][1]
    assert "iter_0000005 is not used" in said
    assert words in said
    assert f"at step {step}" in said
    assert _same(results, undisturbed("dp2_bf16"))


def test_another_layout_takes_the_persistent_one(two_workers, tmp_path):
    two_workers.run(broken_off, tmp_path, DP2)
    results = two_workers.run(
        went_on, tmp_path, {**DP2, "model": {**DROPOUT, "tensor_model_parallel_size": 2}}
    )
    assert "it was saved with other parallel sizes" in results[0][1]
    assert "iter_0000003 at step 3" in results[0][1]


def test_who_empties_the_folder_starts_anew(two_workers, tmp_path, undisturbed):
    two_workers.run(broken_off, tmp_path, DP2, 2)
    assert _parts(tmp_path)
    shutil.rmtree(tmp_path / "run")
    results = two_workers.run(went_on, tmp_path, DP2)
    assert "resumed" not in results[0][1]
    assert _same(results, undisturbed("dp2_bf16"))


def test_it_counts_before_the_first_persistent_one(two_workers, tmp_path, undisturbed):
    two_workers.run(broken_off, tmp_path, DP2, 2)
    results = two_workers.run(went_on, tmp_path, DP2)
    assert "iter_0000002 at step 2" in results[0][1]
    assert _same(results, undisturbed("dp2_bf16"))
    assert not Path(tmp_path / "local").exists() or not _parts(tmp_path)
