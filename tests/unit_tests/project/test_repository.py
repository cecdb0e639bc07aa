# SPDX-License-Identifier: Apache-2.0
"""Rules that every file of the repository keeps."""

import os
import re
import subprocess
import tomllib

import pytest
import yaml

from megatron.bridge.version import __version__
from tests.unit_tests.project.tree import ROOT, tracked

MAX_LINES = 700

# Split, so that this file does not match itself.
REGISTRY_HOSTS = re.compile(
    "|".join(["py" + r"pi\.org", "python" + "hosted", r"registry\.npm" + "js", r"deb\.deb" + "ian"])
)
MACHINE_PATHS = re.compile(
    r"(?<![\w.$}])/(?:"
    + "|".join(["wo" + "rk", "fa" + "rm", "ro" + "ot", "ho" + "me/[a-z]"])
    + r")\b/?"
)


def text_of(path):
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked("src/*.py")
        if (count := len(text_of(path).splitlines())) > MAX_LINES
    }
    assert not long


def test_licence_header():
    missing = [
        str(path.relative_to(ROOT))
        for path in [*tracked("*.py"), *tracked("*.sh")]
        if path.stat().st_size
        and "SPDX-License-Identifier: Apache-2.0" not in "\n".join(text_of(path).splitlines()[:3])
    ]
    assert not missing


@pytest.mark.parametrize(
    "forbidden", [REGISTRY_HOSTS, MACHINE_PATHS], ids=["registry hosts", "machine paths"]
)
def test_nothing_of_one_machine(forbidden):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert not found


def test_no_lock_that_names_hosts():
    assert not tracked("uv.lock")


def test_every_requirement_is_pinned_and_hashed():
    for path in (ROOT / "requirements.lock", ROOT / "scripts" / "demo" / "requirements.txt"):
        joined = path.read_text().replace("\\\n", " ")
        requirements = [
            line
            for line in joined.splitlines()
            if line.strip() and not line.lstrip().startswith("#")
        ]
        assert requirements
        assert [
            line for line in requirements if "==" not in line or "--hash=sha256:" not in line
        ] == []


def test_lock_covers_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *project["dependency-groups"]["docs"],
    ]
    names = {re.match(r"[\w-]+", entry)[0].lower() for entry in wanted}
    locked = set(
        re.findall(r"^([\w-]+)==", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    )
    assert names <= locked, f"run `make lock`: not in requirements.lock: {sorted(names - locked)}"


def test_version_is_told_once():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(
        rf"^## .*{re.escape(__version__)}|^## Unreleased", changelog, flags=re.MULTILINE
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]


def test_licence_is_apache():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_make_targets_exist():
    listed = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in ("setup", "demo", "test", "check", "docs", "bench", "lock", "clean"):
        assert f"make {target} " in listed


@pytest.mark.parametrize("script", [".ci/run", "scripts/setup.sh", "scripts/uv.sh"])
def test_shell_scripts_parse_and_run(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


def test_ci_runs_what_contributors_run():
    steps = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"make\b.* check test docs", steps)


def test_pre_commit_needs_no_network():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
