# SPDX-License-Identifier: Apache-2.0
"""The script of docs/how-to/training-service.md with Tinker's own client."""

import json
import os
import subprocess
import sys

import pytest

from tests.pages import blocks
from tests.training_service import HAS_SERVER, started_service
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/tinker"  # where scripts/extra.sh installs it

pytestmark = pytest.mark.skipif(
    not HAS_SERVER or not BESIDE.is_dir(),
    reason="no client: run scripts/extra.sh serve and scripts/extra.sh tinker",
)

REPORT = """
import json
print(json.dumps([losses, rewards, state, adapter]))
"""


def test_the_script_of_the_page_learns(model_dir, tmp_path):  # noqa: F811
    (block,) = (
        block
        for block in blocks(ROOT / "docs/how-to/training-service.md")
        if block.title == "train_client.py"
    )
    with started_service(model_dir, tmp_path / "service", name="smollm2") as address:
        script = block.text.replace("http://127.0.0.1:8000", address) + REPORT
        variables = os.environ | {"PYTHONPATH": str(BESIDE), "TINKER_TELEMETRY": "0"}
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    losses, rewards, state, adapter = json.loads(run.stdout.splitlines()[-1])
    assert losses[-1] < losses[0] / 2
    assert len(rewards) == 5
    assert state.endswith("/weights/last")
    model = adapter.removeprefix("tinker://").split("/")[0].replace(":", "-")
    folder = tmp_path / "service" / model / "sampler_weights" / "last"
    assert (folder / "adapter_config.json").is_file()
