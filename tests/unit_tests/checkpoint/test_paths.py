# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is the newest, and what an interrupted writer leaves."""

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.utils.errors import UserError


def _publish(root, *iterations, tracker=None):
    for iteration in iterations:
        paths.iteration_dir(root, iteration).mkdir(parents=True)
        (paths.iteration_dir(root, iteration) / "metadata.json").write_text("{}")
    if tracker is not None:
        paths.write_tracker(root, tracker)


def test_the_tracker_says_what_is_newest(tmp_path):
    assert paths.latest_iteration(tmp_path / "nothing") is None
    _publish(tmp_path, 10, 20, tracker=10)
    assert paths.published_iterations(tmp_path) == [10, 20]
    assert paths.latest_iteration(tmp_path) == 10
    assert paths.resolve(tmp_path) == tmp_path / "iter_0000010"
    assert paths.resolve(tmp_path / "iter_0000020") == tmp_path / "iter_0000020"


def test_ten_million_iterations_have_a_name(tmp_path):
    _publish(tmp_path, 12_345_678, tracker=12_345_678)
    assert paths.latest_iteration(tmp_path) == 12_345_678


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        ("", "holds '', not an iteration number"),
        ("release", "holds 'release', not an iteration number"),
        ("-3", "holds '-3', not an iteration number"),
        ("30", "names iteration 30, but"),
    ],
)
def test_a_bad_tracker_names_the_choices(tmp_path, tracker, words):
    _publish(tmp_path, 10, 20)
    (tmp_path / paths.TRACKER).write_text(tracker)
    with pytest.raises(UserError, match=words) as caught:
        paths.resolve(tmp_path)
    assert "give one of its directories instead (iter_0000010, iter_0000020)" in str(caught.value)


def test_a_tracker_that_is_not_text(tmp_path):
    (tmp_path / paths.TRACKER).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read"):
        paths.latest_iteration(tmp_path)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        paths.resolve(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        paths.resolve(tmp_path / "file")
    with pytest.raises(UserError, match=f"holds no {paths.TRACKER}.*no iter_"):
        paths.resolve(tmp_path)
    _publish(tmp_path, 5)
    with pytest.raises(UserError, match=r"give one of its directories instead \(iter_0000005\)"):
        paths.resolve(tmp_path)


def test_names_that_are_no_folder_are_no_checkpoints(tmp_path):
    _publish(tmp_path, 10, tracker=10)
    (tmp_path / "iter_0000020").symlink_to("nowhere")
    (tmp_path / "iter_0000030").touch()
    assert paths.published_iterations(tmp_path) == [10]


def test_leftovers_are_removed_and_never_counted(tmp_path):
    _publish(tmp_path, 10, tracker=10)
    for name in ("iter_0000020.incomplete", "iter_0000005.removed", "iter_0000010.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.incomplete").mkdir()
    assert paths.published_iterations(tmp_path) == [10]
    paths.recover(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"iter_0000010", "notes.incomplete", paths.TRACKER}


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    _publish(tmp_path, 10, tracker=10)
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000010.replaced")
    (tmp_path / "iter_0000010.incomplete").mkdir()
    paths.recover(tmp_path)
    assert paths.resolve(tmp_path) == tmp_path / "iter_0000010"
    assert (tmp_path / "iter_0000010" / "metadata.json").exists()


def test_removing_leaves_no_trace(tmp_path):
    _publish(tmp_path, 10, 20)
    paths.remove(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000020"]


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "config.json", "context"])
def test_a_folder_with_other_contents_takes_no_new_weights(name, tmp_path):
    paths.refuse_used(tmp_path / "absent")
    paths.refuse_used(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=rf"{name}.*choose another directory"):
        paths.refuse_used(tmp_path)


def test_the_folder_of_a_trained_run_takes_no_new_weights(tmp_path):
    _publish(tmp_path, 3, tracker=3)
    with pytest.raises(UserError, match=r"iter_0000003.*choose another directory"):
        paths.refuse_used(tmp_path)
