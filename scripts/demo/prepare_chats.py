# SPDX-License-Identifier: Apache-2.0
"""Write the conversations of the demo; every twentieth question is held out.

usage: prepare_chats.py DIRECTORY_OF_YAML OUTPUT_DIR
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

# A robot that talks about itself and the world; the other files are long answers about programs.
TOPICS = (
    "ai", "botprofile", "computers", "emotion", "food", "gossip", "history", "humor", "literature", "money",
    "movies", "psychology", "science", "sports",
)  # fmt: skip
HELD_OUT = 20


def conversations(folder: Path) -> dict[str, list[str]]:
    """The answers to each question, in the order of the files."""
    found: dict[str, list[str]] = {}
    for topic in TOPICS:
        for turns in yaml.safe_load((folder / f"{topic}.yml").read_text())["conversations"]:
            question, answer, *_ = (" ".join(str(turn).split()) for turn in turns)
            found.setdefault(question, []).append(answer)
    return found


def record(question: str, answer: str) -> dict[str, Any]:
    """One exchange in OpenAI's form."""
    turns = zip(("user", "assistant"), (question, answer), strict=True)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def main() -> None:
    """Split by question, so that no answer to a held-out question is trained on."""
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    files = {name: (output / f"{name}.jsonl").open("w") for name in ("training", "validation")}
    for number, (question, answers) in enumerate(conversations(folder).items()):
        file = files["validation" if number % HELD_OUT == 0 else "training"]
        file.writelines(json.dumps(record(question, answer)) + "\n" for answer in answers)
    for file in files.values():
        file.close()


if __name__ == "__main__":
    main()
