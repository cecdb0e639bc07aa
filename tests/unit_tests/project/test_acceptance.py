# SPDX-License-Identifier: Apache-2.0
"""The acceptance script survives stages that fail or hang, resumes, and judges what was found."""

import json
import sys
import time

import pytest

from scripts.gpu import acceptance, stages
from scripts.gpu.acceptance import Stage, at_least, at_most


def command(monkeypatch, tmp_path, **programs):
    """Stages that run the given Python programs; their names are the letters."""
    found = tuple(Stage(name, name, "", 20, 20, (at_least("speed", 2),)) for name in programs)
    monkeypatch.setattr(acceptance, "STAGES", found)
    real = acceptance.subprocess.Popen

    def popen(words, **options):
        is_stage = "scripts.gpu.stages" in words
        return real([sys.executable, "-c", programs[words[3]]] if is_stage else words, **options)

    monkeypatch.setattr(acceptance.subprocess, "Popen", popen)
    return lambda *more: acceptance.main(["--out", str(tmp_path), *more])


def figures(**values):
    return f"print('{acceptance.FIGURES}' + {json.dumps(json.dumps(values))}, flush=True)"


def states(tmp_path):
    stages = json.loads((tmp_path / "results.json").read_text())["stages"]
    return {name: found["state"] for name, found in stages.items()}


def test_a_failing_stage_stops_no_other(monkeypatch, tmp_path, capsys):
    run = command(
        monkeypatch,
        tmp_path,
        a="raise SystemExit('no such GPU')",
        b=figures(speed=3),
        c=figures(skipped="no TE"),
    )
    assert run() == 1
    assert states(tmp_path) == {"a": "failed", "b": "ok", "c": "skipped"}
    out = capsys.readouterr().out
    assert "exit code 1: no such GPU" in out
    assert "3  met" in out
    assert "not met: a" in out


def test_a_stage_that_hangs_keeps_what_it_found(monkeypatch, tmp_path):
    run = command(monkeypatch, tmp_path, a=f"{figures(speed=1)}\nimport time\ntime.sleep(99)")
    monkeypatch.setattr(acceptance, "STAGES", (Stage("a", "a", "", 1, 1),))
    start = acceptance.subprocess.Popen

    def printed(words, **options):
        """The second begins when the figures are there, however long the process takes to start."""
        process = start(words, **options)
        while "scripts.gpu.stages" in words and not acceptance.last_figures(tmp_path / "a.log"):
            time.sleep(0.05)
        return process

    monkeypatch.setattr(acceptance.subprocess, "Popen", printed)
    assert run() == 1
    found = json.loads((tmp_path / "results.json").read_text())["stages"]["a"]
    assert found["state"] == "failed"
    assert found["figures"] == {"speed": 1}
    assert "1 s" in found["error"]


def test_the_same_command_runs_what_has_not_succeeded(monkeypatch, tmp_path, capsys):
    note = tmp_path / "runs"
    count = f"open({str(note)!r}, 'a').write('x')"
    run = command(
        monkeypatch, tmp_path, a=f"{count}\n{figures(speed=3)}", b=f"{count}\nraise SystemExit(3)"
    )
    for more, runs in (
        ([], 2),
        ([], 3),
        (["--only", "a"], 3),
        (["--only", "a", "--again"], 4),
        (["--quick"], 6),
    ):
        run(*more)
        assert len(note.read_text()) == runs


def test_missed_targets_are_named(monkeypatch, tmp_path, capsys):
    assert command(monkeypatch, tmp_path, a=figures(speed=1))() == 1
    assert "not met: a: speed >= 2" in capsys.readouterr().out
    assert command(monkeypatch, tmp_path, a=figures(speed=1))("--tiny") == 0, (
        "toy figures are not judged"
    )
    assert command(monkeypatch, tmp_path, a=figures(other=1))("--again") == 1, "a figure is missing"
    assert at_most("x", 0.5).met(0.5)


def test_no_time_is_left(monkeypatch, tmp_path):
    assert command(monkeypatch, tmp_path, a=figures(speed=3))("--minutes", "0.1") == 1
    assert states(tmp_path) == {"a": "not run"}


def test_unknown_stages_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no stage z; stages are a"):
        acceptance.main(["--out", str(tmp_path), "--only", "a,z"])


def test_every_stage_has_a_function():
    assert {stage.name for stage in acceptance.STAGES} <= stages.STAGES.keys()
    assert len({stage.letter for stage in acceptance.STAGES}) == len(acceptance.STAGES)


@pytest.mark.sampled
def test_families_at_toy_size(tmp_path, capsys):
    """The one stage that is cheap on a CPU; the test below runs all of them."""
    stages.families("tiny", tmp_path)
    line = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(line.removeprefix(acceptance.FIGURES))
    assert found == {"families compared": 2, "families that differ": 0, "problems": {}}


@pytest.mark.slow
def test_all_stages_at_toy_size(tmp_path):
    assert acceptance.main(["--tiny", "--out", str(tmp_path)]) == 0
