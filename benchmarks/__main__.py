# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark in a process of its own: ``python -m benchmarks``, or one: ``python -m benchmarks NAME ...``."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    "conversion.py",
    "conversion.py --size moe64",
    "streaming.py",
    "streaming.py --size moe64",
    "huge_conversion.py --parameters 1 --export",
    "conversion.py --planning tests/families/published/deepseek-ai--DeepSeek-V3.json",
    "training.py --size 32m",
    "training.py --size 100m --rounds 2",
    "vision_training.py",
    "checkpoint.py --parameters 200",
    "overhead.py",
    "startup.py",
    "kernels.py",
    "lora.py",
    "pretrain_gpu.py --shape llama32-1b --changes",
    "pretrain_gpu.py --shape qwen3-0.6b",
    "lora_gpu.py --shape llama31-8b --data mock",
    "lora_gpu.py --shape llama31-8b --data packed",
    "lora_gpu.py --shape qwen3-8b --data mock",
    "lora_gpu.py --shape qwen3-8b --data packed",
    "preprocessing.py",
    "packing.py",
    "shared_samples.py",
    "mistakes.py",
)


def main() -> int:
    """Run them, or the one that is named, in turn; the exit code is 1 if one failed."""
    failed, (name, *options) = 0, sys.argv[1:] or [""]
    # scripts import each other by name, and packages from the repository
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for command in [shlex.join([f"{name}.py", *options])] if name else COMMANDS:
        script, *arguments = shlex.split(command)
        print(f"\n## benchmarks/{command}\n", flush=True)
        path = str(Path(__file__).with_name(script))
        done = subprocess.run([sys.executable, path, *arguments], check=False, env=environment)
        failed |= done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
