# SPDX-License-Identifier: Apache-2.0
"""How long a mistake takes to be named: each in a fresh process, as a user would meet it.

``python benchmarks/mistakes.py``; seconds from the command to its end, the import of everything included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


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
        seconds = {mistake.name: _seconds(mistake.arguments, folder) for mistake in chosen}
    slowest = sorted(seconds, key=seconds.__getitem__)[-5:]
    median = statistics.median(seconds.values())
    result = {"mistakes": len(seconds), "median_s": round(median, 2)}
    print(json.dumps(result | {"slowest_s": {name: round(seconds[name], 2) for name in slowest}}, indent=2))
    return 0


def _needs_a_run(arguments: list[str]) -> bool:
    return any("{tmp}/saved" in argument or "{tmp}/damaged" in argument for argument in arguments)


def _seconds(arguments: list[str], folder: str) -> float:
    command = [sys.executable, "-m", "megatron.bridge.cli.main"]
    command += [argument.replace("{tmp}", folder) for argument in arguments]
    started = time.perf_counter()
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    taken = time.perf_counter() - started
    assert done.returncode in (1, 2), f"{arguments}: exit code {done.returncode}\n{done.stderr}"
    return taken


if __name__ == "__main__":
    sys.exit(main())
