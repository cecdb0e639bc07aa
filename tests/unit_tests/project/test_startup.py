# SPDX-License-Identifier: Apache-2.0
"""What starting costs: importing the package and asking for help load nothing heavy."""

import json
import os
import pty
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


@pytest.mark.sampled
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


@pytest.mark.sampled
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


@pytest.mark.sampled
def test_optimizers_do_not_import_the_compiler():
    """It takes 1 s; what they compute and call is the same with it."""
    modules, without = loaded_by(OPTIMIZE.replace("\n", "\n    "), "probe")
    assert "torch._dynamo" not in modules
    _, first = loaded_by(("import torch._dynamo" + OPTIMIZE).replace("\n", "\n    "), "probe")
    assert without == first
    assert without.endswith("hook hook\n")


DEFERRED = """
import sys, tempfile
import megatron.bridge
import torch
from megatron.core.timers import Timers
from torch.distributed import HashStore, init_process_group
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast
LlamaConfig()
assert "transformers.generation.continuous_batching.cache" in sys.modules
assert not {"sympy", "tensorboard", "torch._dynamo"} & sys.modules.keys()

init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
from torch.distributed.tensor._ops import _tensor_ops
values = torch.arange(12.0).view(3, 4)
sharded = distribute_tensor(values, DeviceMesh("cpu", [0]), [Shard(0)])
assert torch.equal(sharded[:, 1:3].full_tensor(), values[:, 1:3])
assert _tensor_ops.statically_known_true(True) is True
from torch.fx.experimental import symbolic_shapes
assert _tensor_ops.statically_known_true is symbolic_shapes.statically_known_true

from torch.utils.tensorboard import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
folder = tempfile.mkdtemp()
timers = Timers(1, "max")
timers("step", log_level=0).start()
timers("step").stop()
with SummaryWriter(folder) as writer:
    timers.write(["step"], writer, 3, reset=False)
    timers.write(["step"], writer, 4)
events = EventAccumulator(folder).Reload()
print([event.step for event in events.Scalars("step-time")])
"""


@pytest.mark.sampled
def test_what_is_imported_late_works():
    """DTensors compare symbolic shapes with sympy, and Megatron-Core's timers write to TensorBoard."""
    _, output = loaded_by(DEFERRED.replace("\n", "\n    "), "probe")
    assert output == "[3, 4]\n"


ANNOUNCED = """
import sys
from megatron.bridge.utils.startup import announce_slow_imports
announce_slow_imports()
import csv
sys.stderr.write("checked\\n")
sys.stderr.flush()
import torch
import transformers
"""


@pytest.mark.parametrize(
    ("in_terminal", "rank", "lines"),
    [
        (True, "0", ["checked", "loading libraries ..."]),
        (True, "1", ["checked"]),
        (False, "0", ["checked"]),
    ],
)
def test_a_terminal_is_told_before_a_slow_import(tmp_path, in_terminal, rank, lines):
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RANK": rank}
    reader, writer = pty.openpty() if in_terminal else os.pipe()
    subprocess.run(
        [sys.executable, "-c", ANNOUNCED], stderr=writer, env=environment, cwd=ROOT, check=True
    )
    os.close(writer)
    assert os.read(reader, 1000).decode().splitlines() == lines
    os.close(reader)
