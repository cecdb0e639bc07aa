# SPDX-License-Identifier: Apache-2.0
"""Where a run starts: its own folder first, then what it is told to load."""

from megatron.bridge.checkpoint import paths
from tests.functional_tests.checkpoint.runs import STEPS, run_to

EVERY_TWO = {"checkpoint": {"save_interval": 2}}


def _finetuned(root, stop, load):
    return run_to(root, stop, {"checkpoint": {"finetune": True, "save_interval": 1}}, load=load)


def _loaded(root, load):
    return run_to(root, STEPS, {}, load=load)


def test_a_run_goes_on_from_another_folder_and_then_from_its_own(two_workers, tmp_path):
    undisturbed = two_workers.run(run_to, tmp_path / "first", STEPS, EVERY_TWO)
    branched = two_workers.run(
        _loaded, tmp_path / "second", str(tmp_path / "first" / "iter_0000002")
    )
    assert branched == undisturbed
    assert paths.published_iterations(tmp_path / "second") == [STEPS]
    again = two_workers.run(_loaded, tmp_path / "second", str(tmp_path / "first" / "iter_0000002"))
    assert again == undisturbed  # nothing was left to do


def test_finetuning_takes_weights_and_goes_on_when_interrupted(two_workers, tmp_path):
    two_workers.run(run_to, tmp_path / "first", STEPS, EVERY_TWO)
    load = str(tmp_path / "first")
    undisturbed = two_workers.run(_finetuned, tmp_path / "straight", 4, load)
    assert list(undisturbed[0]["losses"]) == [1, 2, 3, 4]
    two_workers.run(_finetuned, tmp_path / "second", 2, load)
    assert two_workers.run(_finetuned, tmp_path / "second", 4, load) == undisturbed
