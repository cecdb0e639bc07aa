# SPDX-License-Identifier: Apache-2.0
"""The demo fails, with one sentence, when it did not prove what it claims."""

import json
import sys

import pytest

from megatron.bridge.utils.errors import UserError
from scripts.demo import audio, chat, shakespeare, vision
from scripts.demo.paths import Paths, clear
from scripts.demo.runner import Runner, as_typed, megatron_bridge, torchrun

GOOD = {
    "samples": 120,
    "loss_before": 3.76,
    "loss_after": 3.5,
    "logit_difference": 1e-5,
    "logit_scale": 30.0,
    "logit_tolerance": 3e-3,
    "prompt": "HAMLET.\n",
    "text_before": "before",
    "text_after": "after",
}


@pytest.mark.parametrize(
    ("step_seconds", "steps"),
    [(0.5, 20), (12.0, 20), (12.1, 19), (30.0, 8), (60.0, 4), (600.0, 4)],
)
def test_a_slow_machine_trains_fewer_steps(step_seconds, steps):
    """Four minutes of training, at least 4 and at most 20 steps."""
    assert shakespeare.choose_steps(step_seconds) == steps


@pytest.fixture
def paths(tmp_path):
    return Paths(tmp_path / "cache", tmp_path / "out")


@pytest.fixture
def runner(paths):
    clear(paths.out)
    return Runner(paths.out / "logs", stages=1)


CHATS = {
    "questions": ["What can you eat?", "Who are you?"],
    "before": {"answers": ["[Anything].", "A curious soul."], "loss": 3.5},
    "after": {"answers": ["I eat RAM.", "A robot."], "loss": 2.5},
}


def write_report(paths, **changed):
    paths.out.mkdir(exist_ok=True)
    (paths.out / "report.json").write_text(json.dumps(GOOD | changed))
    (paths.out / "answers.json").write_text(json.dumps(CHATS))


def write_answers(paths, correct, name="shapes"):
    paths.out.mkdir(exist_ok=True)
    said = {"answers": ["red circle"] * 10}
    report = {
        "expected": ["red circle"] * 10,
        "before": {**said, "correct": 0},
        "after": {**said, "correct": correct},
    }
    (paths.out / f"{name}.json").write_text(json.dumps(report))


def test_a_model_that_sees_is_a_success(paths):
    write_answers(paths, 9)
    vision.verify(paths)
    text = vision.summary(paths)
    for told in ("10 pictures", "0 before", "9 after", "shapes.html", "preview.html"):
        assert told in text


def test_a_model_that_does_not_see_is_a_failure(paths):
    write_answers(paths, 7)
    with pytest.raises(UserError, match="7 of 10"):
        vision.verify(paths)


def test_a_model_that_hears_is_a_success(paths):
    write_answers(paths, 9, "digits")
    audio.verify(paths)
    text = audio.summary(paths)
    for told in ("10 recordings", "0 before", "9 after", "digits.html", "preview.html"):
        assert told in text


def test_a_model_that_does_not_hear_is_a_failure(paths):
    write_answers(paths, 7, "digits")
    with pytest.raises(UserError, match="7 of 10"):
        audio.verify(paths)


def test_a_proof_is_a_success(paths):
    write_report(paths)
    shakespeare.verify(paths)
    text = shakespeare.summary(paths)
    for told in ("3.760 before", "3.500 after", "61,440 tokens", "loss.png", "'after'"):
        assert told in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss_after": 3.76}, "loss .* 3.760 before, 3.760 after; try more --steps"),
        ({"logit_difference": 0.01}, "logits .* 1.00e-02"),
        ({"logit_difference": float("nan")}, "logits .* nan"),
        ({"loss_after": float("nan")}, "loss .* nan after; try more --steps"),
    ],
)
def test_what_was_not_proven_is_an_error(paths, changed, words):
    write_report(paths, **changed)
    with pytest.raises(UserError, match=words):
        shakespeare.verify(paths)


def test_answers_are_side_by_side(paths):
    write_report(paths)
    chat.verify(paths)
    text = chat.summary(paths)
    assert "3.500 before, 2.500 after" in text
    (row,) = [line for line in text.splitlines() if "What can you eat?" in line]
    assert row.index("[Anything].") < row.index("I eat RAM.")


def test_an_adapter_that_learned_nothing_is_an_error(paths):
    write_report(paths)
    (paths.out / "answers.json").write_text(json.dumps(CHATS | {"after": CHATS["before"]}))
    with pytest.raises(UserError, match=r"did not fall: 3\.500 before, 3\.500 after"):
        chat.verify(paths)


def test_a_stage_that_fails_shows_its_log(runner, capsys):
    code = "import sys; print('the reason'); sys.exit(3)"
    with (
        pytest.raises(UserError, match=r"stage 1 .* exit code 3: its log is"),
        runner.stage("a title"),
    ):
        runner.run(sys.executable, "-c", code)
    shown = capsys.readouterr().out
    assert "[1/1] a title" in shown
    assert "| the reason" in shown


def test_a_live_stage_shows_what_it_prints(runner, capsys):
    with runner.stage("a title"):
        runner.run(sys.executable, "-c", "print('progress')", live=True)
    assert "      progress\n" in capsys.readouterr().out


def test_only_its_own_folder_is_emptied(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="holds other files"):
        clear(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    clear(tmp_path / "demo")
    (tmp_path / "demo" / "old").touch()
    clear(tmp_path / "demo")
    assert not (tmp_path / "demo" / "old").exists()


def test_an_output_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        clear(tmp_path / "file" / "out")


def test_commands_are_shown_as_a_user_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        as_typed([*megatron_bridge("convert"), str(tmp_path / "x")]) == "megatron-bridge convert x"
    )
    assert as_typed(torchrun()) == "torchrun --standalone --nproc-per-node=2"
