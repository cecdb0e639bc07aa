# SPDX-License-Identifier: Apache-2.0
"""What starting costs: importing the package and asking for help load nothing heavy."""

import json
import subprocess
import sys

import pytest

from tests.unit_tests.project.tree import ROOT, tracked

HEAVY = {"torch", "transformers", "megatron.core", "datasets", "matplotlib", "omegaconf"}

PROBE = """
import json, runpy, sys
sys.argv = {argv!r}
try:
    {statement}
except SystemExit as stop:
    assert not stop.code, stop.code
print(json.dumps(sorted(set(sys.modules))), file=sys.stderr)
"""


def loaded_by(statement, *argv):
    """Modules that a fresh interpreter holds after ``statement``, and what it printed."""
    code = PROBE.format(argv=list(argv), statement=statement)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stderr.splitlines()[-1])), result.stdout


def test_import_is_light():
    modules, _ = loaded_by("import megatron.bridge", "probe")
    assert "megatron.bridge" in modules
    assert not modules & HEAVY


def test_help_of_the_command_is_light():
    from megatron.bridge.cli.main import COMMANDS

    for command in ([], *([name] for name in COMMANDS)):
        modules, output = loaded_by(
            "from megatron.bridge.cli.main import main; sys.exit(main())",
            "megatron-bridge",
            *command,
            "--help",
        )
        assert output.startswith("usage: ")
        assert not modules & HEAVY


SCRIPTS = [
    str(path.relative_to(ROOT))
    for folder in ("scripts/training", "scripts/data", "examples/conversion")
    for path in tracked(f"{folder}/*.py")
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_scripts_is_light(script):
    modules, output = loaded_by(
        f"runpy.run_path({script!r}, run_name='__main__')", script, "--help"
    )
    assert output.startswith("usage: ")
    assert not modules & HEAVY


OPTIMIZE = """
import megatron.bridge.backends.cpu.device as device
device.install()
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizers = [kind([weight], lr=0.1) for kind in (torch.optim.AdamW, torch.optim.SGD)]
called = []
optimizers[0].register_step_post_hook(lambda *_: called.append("hook"))
for _ in range(2):
    weight.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
print(*weight.tolist(), *called)
"""


def test_optimizers_do_not_import_the_compiler():
    """It takes 1 s; what they compute and call is the same with it."""
    modules, without = loaded_by(OPTIMIZE.replace("\n", "\n    "), "probe")
    assert "torch._dynamo" not in modules
    _, first = loaded_by(("import torch._dynamo" + OPTIMIZE).replace("\n", "\n    "), "probe")
    assert without == first
    assert without.endswith("hook hook\n")
