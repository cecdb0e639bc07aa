# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge trace merge`` as a script.

python tools/merge_profiler_traces.py -i outputs/TIME/MODEL/torch_profiler/Decoder [-o merged.json.gz]
"""

import argparse
import sys
from pathlib import Path

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Merge the profiler traces of all ranks into one.")
    parser.add_argument(
        "-i", "--input", required=True, type=Path, metavar="DIR", help="folder of traces"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: merged.json.gz beside the traces",
    )
    args = parser.parse_args()
    output = [] if args.output is None else ["--output", str(args.output)]
    sys.exit(main(["trace", "merge", str(args.input), *output]))
