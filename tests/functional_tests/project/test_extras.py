# SPDX-License-Identifier: Apache-2.0
"""Every extra of this package can be installed beside the PyTorch that it was made for."""

import subprocess
import tomllib

import pytest

from tests.unit_tests.project.tree import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_GLIBC = {"resiliency": "x86_64-manylinux_2_39"}
OFFLINE = ("error sending request", "dns error", "network connectivity is disabled")


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_resolves_and_leaves_torch_alone(extra):
    platform = ["--python-platform", OF_GLIBC[extra]] if extra in OF_GLIBC else []
    command = [
        "scripts/uv.sh",
        "pip",
        "install",
        "--python",
        ".venv/bin/python",
        "--dry-run",
        *platform,
    ]
    done = subprocess.run(
        [*command, "--no-build-isolation", f".[{extra}]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if any(sign in done.stderr.lower() for sign in OFFLINE):
        pytest.skip("offline")
    assert done.returncode == 0, done.stderr
    assert "Resolved" in done.stderr
    assert " - torch==" not in done.stderr
