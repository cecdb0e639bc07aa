# SPDX-License-Identifier: Apache-2.0
"""Ask a model the same questions before and after fine-tuning, and measure its loss on held-out conversations.

Writes a report as JSON. It prints numbers and judges nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

QUESTIONS = ("What can you eat?", "Where are you from?", "Are you a robot?", "What is a computer?")
NEW_TOKENS = 24
IGNORED = -100


def ask(model: Any, tokenizer: Any, question: str) -> str:
    """The most likely answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt")
    found = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return " ".join(
        tokenizer.decode(found[0][prompt.input_ids.shape[1] :], skip_special_tokens=True).split()
    )


def loss(model: Any, tokenizer: Any, conversations: list[list[dict[str, str]]]) -> float:
    """The mean over all tokens of the answers."""
    total, count = 0.0, 0
    for messages in conversations:
        whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False)).input_ids
        start = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        before = len(tokenizer(start).input_ids)
        labels = torch.tensor([[IGNORED] * before + whole[before:]])
        total += model(torch.tensor([whole]), labels=labels).loss.item() * (len(whole) - before)
        count += len(whole) - before
    return total / count


@torch.no_grad()
def measure(directory: Path, conversations: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Answers and loss of one model, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = [ask(model, tokenizer, question) for question in QUESTIONS]
    return {"answers": answers, "loss": loss(model, tokenizer, conversations)}


def main() -> None:
    """Measure both models and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("before", "after", "held-out", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    held_out = [json.loads(line)["messages"] for line in args.held_out.read_text().splitlines()]
    report = {
        "questions": QUESTIONS,
        "before": measure(args.before, held_out),
        "after": measure(args.after, held_out),
    }
    args.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))  # noqa: T201 - the log of this stage


if __name__ == "__main__":
    main()
