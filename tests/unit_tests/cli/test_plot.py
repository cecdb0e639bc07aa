# SPDX-License-Identifier: Apache-2.0
"""Curves of runs: what is drawn, from which rows, and what is refused by name."""

import json

import pytest

from megatron.bridge.cli import main
from megatron.bridge.utils import loss_curves
from megatron.bridge.utils.errors import UserError


def write(folder, steps, loss, more=""):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "kind": "train", "lm loss": loss / step, "tokens per second": 100.0}
        | {"step time": 1.8, "consumed tokens": step * 10**9}
        for step in steps
    ]
    lines.append({"step": steps[-1], "kind": "validation", "lm loss": loss})
    with (folder / loss_curves.METRICS).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + more)
    return folder


def run(capsys, *arguments):
    code = main.main(["plot", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_picture_of_two_runs(tmp_path, capsys):
    from matplotlib.image import imread

    runs = [
        write(tmp_path / name / "run", [1, 2, 3, 4], loss)
        for name, loss in (("a", 4.0), ("b", 2.0))
    ]
    target = tmp_path / "curves.png"
    code, out, _ = run(capsys, *runs, "-o", target, "--smooth", 2)
    assert (code, out) == (0, f"{target}: lm loss, tokens per second of 2 runs\n")
    picture = imread(target)
    assert picture.shape[0] > 900
    colours = {
        tuple(pixel) for pixel in (picture[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    }
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # the first two of matplotlib's cycle


@pytest.mark.parametrize(
    ("output", "picture"), [("", "curves.png"), ("loss", "loss.png"), ("b.svg", "b.svg")]
)
def test_picture_is_where_it_is_said_to_be(tmp_path, capsys, output, picture):
    folder = write(tmp_path / "run", [1, 2], 4.0)
    assert run(capsys, folder, "-o", tmp_path / output)[1].startswith(
        f"{tmp_path / picture}: lm loss"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"run", picture}


def test_steps_that_were_done_again_count_once(tmp_path):
    folder = write(tmp_path, [1, 2, 3, 4], 4.0, more='{"step": 5, "ki')
    path = folder / loss_curves.METRICS
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    write(tmp_path, [3, 4, 5], 8.0)
    train, validation = loss_curves.curves(loss_curves.read_metrics(tmp_path), "lm loss", "run")
    assert (train.x, train.y) == ([1, 2, 3, 4, 5], [4.0, 2.0, 8 / 3, 2.0, 8 / 5])
    assert (validation.x, validation.y) == ([5], [8.0])


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    write(tmp_path, [1, 2], 4.0, more='{"step": 3, "ki')
    assert [row["step"] for row in loss_curves.read_metrics(tmp_path)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("axis", "places"), [("tokens", [2.0, 4.0]), ("time", [2 * 1.8 / 3600, 4 * 1.8 / 3600])]
)
def test_axes(tmp_path, axis, places):
    rows = loss_curves.read_metrics(write(tmp_path, [2, 4], 4.0))
    train, validation = loss_curves.curves(rows, "lm loss", "run", axis)
    assert train.x == pytest.approx(places)
    assert validation.x == pytest.approx(places[1:])


def test_what_cannot_be_drawn_is_named(tmp_path, capsys):
    folder = write(tmp_path / "run", [1, 2], 4.0)
    refusals = {
        (folder, "--metric", "lm los"): "has no metric 'lm los'; did you mean lm loss?",
        (folder, "--smooth", "0"): "--smooth 0: at least 1 point is needed",
        (tmp_path / "other",): f"{tmp_path / 'other'} cannot be read: give a run's folder",
        (folder, "-o", tmp_path / "no" / "x.png"): "x.png cannot be written",
        (folder, "-o", tmp_path / "x.docx"): "x.docx cannot be written",
    }
    for arguments, message in refusals.items():
        code, _, err = run(capsys, *arguments)
        assert code == 1
        assert message in err
    path = folder / loss_curves.METRICS
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1 is damaged: '{}'"):
        loss_curves.read_metrics(folder)
    path.write_text('{"step": 1, "kind": "train", "lm loss": 1.0}\n')
    with pytest.raises(UserError, match=r"does not have 'consumed tokens', which --x tokens needs"):
        loss_curves.curves(loss_curves.read_metrics(folder), "lm loss", "", "tokens")
