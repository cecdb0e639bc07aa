# SPDX-License-Identifier: Apache-2.0
"""Prometheus reads the numbers of ``metrics.jsonl`` while a run trains."""

import json
import re
import socket
import sys
import urllib.request
from importlib.util import find_spec

import pytest

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.observe.metric_formats import METRIC_FORMATS
from megatron.bridge.training.callbacks.observe.outputs import NAMESPACE
from megatron.bridge.training.config import CheckpointConfig, LoggerConfig, ValidationConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import free_port
from tests.toy_run import toy_config
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/serve"  # where scripts/extra.sh installs it
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))

pytestmark = pytest.mark.skipif(
    find_spec("prometheus_client") is None,
    reason="prometheus_client is not installed: run scripts/extra.sh serve",
)
DASHBOARD = ROOT / "docs/grafana-dashboard.json"


class Scrape(Callback):
    """Reads the page after each step."""

    def __init__(self, port):
        self.port, self.pages = port, []

    def on_train_step_end(self, context):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as page:
            self.pages.append(page.read().decode())


def config_of(folder, port):
    return toy_config(
        train={"train_iters": 4},
        checkpoint=CheckpointConfig(save=str(folder), save_interval=2),
        logger=LoggerConfig(log_interval=1, log_dir=str(folder), prometheus_port=port),
        validation=ValidationConfig(eval_interval=2, eval_iters=1),
    )


def value(page, metric):
    (found,) = re.findall(rf"^{re.escape(NAMESPACE + metric)} (.*)$", page, re.MULTILINE)
    return float(found)


def test_pages_have_the_logged_numbers(tmp_path):
    scrape = Scrape(free_port())
    pretrain(config_of(tmp_path, scrape.port), forward_step, callbacks=[scrape])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    assert [value(page, "step") for page in scrape.pages] == [1, 2, 3, 4]
    for row, page in zip(train, scrape.pages, strict=True):
        assert value(page, 'loss{kind="train",name="lm loss"}') == row["lm loss"]
        for name in ("tokens per second", "step time", "grad norm", "memory GB", "skipped steps"):
            shown = METRIC_FORMATS[name]
            assert value(page, shown.gauge) == pytest.approx(row[name] * shown.factor)
    assert [value(page, "checkpoint_step") for page in scrape.pages] == [-1, -1, 2, 2]
    assert value(scrape.pages[0], "checkpoint_timestamp_seconds") == 0
    published = (tmp_path / "latest_checkpointed_iteration.txt").stat().st_mtime
    assert 0 < value(scrape.pages[3], "checkpoint_timestamp_seconds") <= published
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{scrape.port}/metrics", timeout=60)
    dashboard_shows_what_is_served(scrape.pages[3])


def dashboard_shows_what_is_served(page):
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for panel in dashboard["panels"] for target in panel.get("targets", ())
             for name in re.findall(rf"{NAMESPACE}\w+", target["expr"])}  # fmt: skip
    known = {NAMESPACE + shown.gauge for shown in METRIC_FORMATS.values()}
    assert asked
    assert asked <= known | set(re.findall(rf"^({NAMESPACE}\w+)", page, re.MULTILINE))


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"logger\.prometheus_port={port}.*choose another port"
        ):
            pretrain(config_of(tmp_path, port), forward_step)


def test_a_port_beyond_the_last_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"logger\.prometheus_port=70000.*65535"):
        config_of(tmp_path, 70_000).validate(1)
