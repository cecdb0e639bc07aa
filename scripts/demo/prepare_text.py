# SPDX-License-Identifier: Apache-2.0
"""Write the text of the demo: the plays to train on as JSONL, one document per line, and one held-out play.

usage: prepare_text.py TEXTS_DIR OUTPUT_DIR
"""

import json
import sys
from pathlib import Path

HELD_OUT = "tempest"  # no other work quotes it, so its loss measures style and not memory


def main() -> None:
    """Write ``train.jsonl`` and ``held_out.txt``."""
    texts, output = Path(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    with (output / "train.jsonl").open("w") as train:
        for path in sorted(texts.glob("*_gut.txt")):
            text = path.read_text()
            if path.stem == f"{HELD_OUT}_gut":
                (output / "held_out.txt").write_text(text)
            else:
                train.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
