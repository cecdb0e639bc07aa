# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal and as a page, from the files of a run."""

import base64
import json
import os
import re
import time
from datetime import datetime
from html.parser import HTMLParser

import pytest

from megatron.bridge.cli import main
from megatron.bridge.utils.run_status import read_status

STEPS = 40
NOW = datetime(2026, 3, 4, 12, 0)


def write_run(folder, upto, age=0.0, **more):
    """A run of 40 steps, logged every 10 steps of 90 s, as it is after ``upto`` steps."""
    folder.mkdir(exist_ok=True)
    rows = []
    for step in range(10, upto + 1, 10):
        row = {"step": step, "kind": "train", "lm loss": 5.0 - step / 10, "step time": 90.0} | more
        rows += [
            row | {"tokens per second": 1000.0},
            {"step": step, "kind": "validation", "lm loss": 6.0},
        ]
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(file, (time.time() - age,) * 2)
    (folder / "run_config.yaml").write_text(
        f"train:\n  train_iters: {STEPS}\ncheckpoint:\n  save: {folder}\n"
    )
    return folder


def watch(capsys, *arguments):
    code = main.main(["watch", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_running_run_says_when_it_ends(tmp_path):
    found = read_status(write_run(tmp_path / "run", 30)).summary(NOW)
    assert found["state"] == "running"
    assert found["step"] == "30 of 40 (75%)"
    left = re.fullmatch(r"0:1[45]:\d\d left, ends 12:1[45]", found["time"])  # ten steps of 90 s
    assert left, found
    assert found["checkpoint"] == "none yet"


def test_time_since_the_last_line_counts(tmp_path):
    found = read_status(write_run(tmp_path / "run", 30, age=600.0)).summary(NOW)
    assert re.fullmatch(r"0:0[45]:\d\d left, ends 12:0[45]", found["time"]), found


def test_a_finished_run_has_no_end_ahead(tmp_path):
    folder = write_run(tmp_path / "run", STEPS, age=1e6)
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    found = read_status(folder).summary(NOW)
    assert found["state"] == "finished"
    assert "time" not in found
    assert found["checkpoint"].startswith("step 40, ")


def test_a_run_that_is_silent_for_long_is_not_called_running(tmp_path):
    found = read_status(write_run(tmp_path / "run", 30, age=3 * 900 + 60)).summary(NOW)
    assert "no new line for 0:4" in found["state"]
    assert "time" not in found


def test_the_slowest_rank_is_named_if_all_times_are_logged(tmp_path):
    times = {f"time/forward-backward rank {rank}": 1.0 + (rank == 2) for rank in range(4)} | {
        "time/optimizer rank 0": 0.1
    }
    found = read_status(write_run(tmp_path / "run", 10, **times)).summary(NOW)
    assert found["slowest rank"] == "2, forward-backward 2 s, the median is 1 s"


def test_the_terminal_shows_curves(tmp_path, capsys):
    code, out, _ = watch(capsys, write_run(tmp_path / "run", STEPS))
    assert code == 0
    assert "█▆▃▁" in out  # the loss falls
    assert "4 to 1, lowest 1, highest 4" in out
    assert re.search(r"tokens per second\s+▁▁▁▁", out)


class Page(HTMLParser):
    """What a page holds: elements, and references that would need a network."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [
            value for name, value in attributes if name in ("src", "href", "xlink:href")
        ]


def test_the_page_needs_no_network(tmp_path, capsys):
    file = tmp_path / "run.html"
    folder = write_run(tmp_path / "a<b>", 30, **{"grad norm": float("nan")})
    assert (
        watch(
            capsys, folder, "--once", "--html", file, "--metric", "lm loss", "--metric", "grad norm"
        )[0]
        == 0
    )
    text = file.read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "<b>" not in text
    (picture,) = page.references
    assert picture.startswith("data:image/svg+xml;base64,")
    assert b"</svg>" in base64.b64decode(picture.partition(",")[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--metric", "lm los"), ("--metric lm los", "did you mean lm loss")),
        (("--html", "{run}/metrics.jsonl/page.html"), ("--html", "choose another file")),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, arguments, words):
    folder = write_run(tmp_path / "run", 10)
    code, _, err = watch(capsys, folder, "--once", *(word.format(run=folder) for word in arguments))
    assert code == 1
    assert all(word in err for word in words), err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    code, _, err = watch(capsys, tmp_path)
    assert code == 1
    assert str(tmp_path) in err
    assert "metrics.jsonl" in err
