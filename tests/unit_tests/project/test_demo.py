# SPDX-License-Identifier: Apache-2.0
"""The demo's own judgement: it fails when it did not prove what it claims, in one sentence."""

import json
import sys

import pytest

from megatron.bridge.cli import demo
from megatron.bridge.utils.errors import UserError

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


@pytest.fixture
def places(tmp_path):
    return demo.Places(tmp_path / "cache", tmp_path / "out")


@pytest.fixture
def stages(places):
    demo._clear(places.out)
    return demo.Stages(places.out / "logs", count=1)


CHATS = {
    "questions": ["What can you eat?", "Who are you?"],
    "before": {"answers": ["[Anything].", "A curious soul."], "loss": 3.5},
    "after": {"answers": ["I eat RAM.", "A robot."], "loss": 2.5},
}


def write_report(places, **changed):
    places.out.mkdir(exist_ok=True)
    (places.out / "report.json").write_text(json.dumps(GOOD | changed))
    (places.out / "answers.json").write_text(json.dumps(CHATS))


def test_a_proof_is_a_success(places):
    write_report(places)
    demo.verdict(places)
    text = demo.summary(places)
    for told in ("3.760 before", "3.500 after", "61,440 tokens", "loss.png", "'after'"):
        assert told in text


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss_after": 3.76}, "did not fall"),
        ({"logit_difference": 0.01}, "differs from the trained one"),
        ({"logit_difference": float("nan")}, "differs from the trained one"),
        ({"loss_after": float("nan")}, "did not fall"),
    ],
)
def test_what_was_not_proven_is_an_error(places, changed, sentence):
    write_report(places, **changed)
    with pytest.raises(UserError, match=sentence):
        demo.verdict(places)


def test_answers_stand_side_by_side(places):
    write_report(places)
    demo.chat_verdict(places)
    text = demo.chat_summary(places)
    assert "loss of answers 3.500 before, 2.500 after" in text
    (row,) = [line for line in text.splitlines() if "What can you eat?" in line]
    assert row.index("[Anything].") < row.index("I eat RAM.")


def test_an_adapter_that_learnt_nothing_is_an_error(places):
    write_report(places)
    (places.out / "answers.json").write_text(json.dumps(CHATS | {"after": CHATS["before"]}))
    with pytest.raises(UserError, match=r"did not fall: 3\.500 before, 3\.500 after"):
        demo.chat_verdict(places)


def test_a_stage_that_fails_shows_its_log(stages, capsys):
    code = "import sys; print('the reason'); sys.exit(3)"
    with pytest.raises(UserError, match=r"stage 1 .* exit code 3: its log is"), stages.stage("a title"):
        stages.run(sys.executable, "-c", code)
    shown = capsys.readouterr().out
    assert "[1/1] a title" in shown
    assert "| the reason" in shown


def test_a_live_stage_shows_what_it_prints(stages, capsys):
    with stages.stage("a title"):
        stages.run(sys.executable, "-c", "print('progress')", live=True)
    assert "      progress\n" in capsys.readouterr().out


def test_only_its_own_folder_is_emptied(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="holds other files"):
        demo._clear(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    demo._clear(tmp_path / "demo")
    (tmp_path / "demo" / "old").touch()
    demo._clear(tmp_path / "demo")
    assert not (tmp_path / "demo" / "old").exists()


def test_an_output_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        demo._clear(tmp_path / "file" / "out")


def test_commands_are_shown_as_a_user_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.displayed([*demo.bridge("convert"), str(tmp_path / "x")]) == "megatron-bridge convert x"
    assert demo.displayed(demo.torchrun()) == "torchrun --standalone --nproc-per-node=2"
