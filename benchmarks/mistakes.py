# SPDX-License-Identifier: Apache-2.0
"""How long a mistake takes to be named: each in a fresh process, as a user would meet it.

``python benchmarks/mistakes.py``; seconds from the command to its end, the import of everything included, and the
seconds of CPU among them, which other work on the machine changes less. Modules are compiled before: Python keeps
what it compiled, whatever the environment says.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INTERPRETER = [sys.executable, "-c", "pass"]
COMMAND = [sys.executable, "-m", "megatron.bridge.cli.main"]


def main() -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth mistake")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import megatron.bridge  # noqa: F401  # before megatron.core, which the toys import

    from tests.unit_tests.cli.mistakes import places  # isort: skip
    from tests.unit_tests.cli.mistakes.table import MISTAKES

    # those that need the checkpoint of a run stay with the test
    chosen = [mistake for mistake in MISTAKES if not _needs_a_run(mistake.arguments)][:: args.every]
    with tempfile.TemporaryDirectory() as folder:
        places.make(Path(folder))
        commands = {
            mistake.name: [*COMMAND, *(word.replace("{tmp}", folder) for word in mistake.arguments)]
            for mistake in chosen
        }
        for name in [*commands][::10]:
            _seconds(commands[name], folder)
        taken = {name: _seconds(command, folder) for name, command in commands.items()}
        bare = _seconds(INTERPRETER, folder)
    result = {"mistakes": len(taken), "load": os.getloadavg()[0], "interpreter_s": bare}
    medians = [round(statistics.median(column), 2) for column in zip(*taken.values(), strict=True)]
    result |= dict(zip(("median_s", "median_cpu_s"), medians, strict=True))
    print(
        json.dumps(
            result | {"s_and_cpu_s": dict(sorted(taken.items(), key=lambda item: item[1]))},
            indent=2,
        )
    )
    return 0


def _needs_a_run(arguments: list[str]) -> bool:
    return any("{tmp}/saved" in argument or "{tmp}/damaged" in argument for argument in arguments)


def _seconds(command: list[str], folder: str) -> tuple[float, float]:
    """Seconds of a command, and of CPU."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, started = _cpu(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    taken = time.perf_counter() - started, _cpu() - before
    assert command == INTERPRETER or done.returncode in (1, 2), (
        f"{command}: {done.returncode}\n{done.stderr}"
    )
    return round(taken[0], 2), round(taken[1], 2)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
