# SPDX-License-Identifier: Apache-2.0
"""Ask a model about held-out pictures before and after training, with transformers' own model code.

Writes a report as JSON and a web page with the pictures. It prints numbers and judges nothing.
"""

import base64
import html
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.processing import load_media_processor
from megatron.bridge.data.media.processor import MediaProcessor
from scripts.demo.evaluation import answer_cell, evaluate

NEW_TOKENS = 16
SHOWN = 24
PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>Pictures and answers</title>
<style>body {{ font-family: sans-serif; color: #222; background: #fff; }} td, th {{ padding: 4px 12px; }}
img {{ width: 96px; image-rendering: pixelated; }} .wrong {{ color: #b00; }} .right {{ color: #070; }}</style>
</head><body><h1>{question}</h1><p>Correct answers about {count} pictures that were never trained on:
{before} before training, {after} after it.</p><table><tr><th>picture</th><th>before</th><th>after</th></tr>
{rows}
</table></body></html>
"""


@torch.no_grad()
def answers(directory: Path, records: list[dict[str, Any]], pictures: Path) -> list[str]:
    """What a model says about the picture of each record."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    media = load_media_processor(MediaRules(str(directory), str(pictures)), tokenizer)
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    return [answer(model, tokenizer, media, record["messages"][:1]) for record in records]


def answer(
    model: Any, tokenizer: Any, media: MediaProcessor, messages: list[dict[str, Any]]
) -> str:
    """The most likely answer to a question about one picture."""
    image = media.references([("image", messages[0]["content"][0]["image"])], "the record")[0]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text.replace(media.placeholder(), media.text(image)), return_tensors="pt")
    types = (prompt.input_ids == media.token_ids[0]).long()
    found = model.generate(
        **prompt,
        **media.pixels([image]),
        mm_token_type_ids=types,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return " ".join(
        tokenizer.decode(found[0][prompt.input_ids.shape[1] :], skip_special_tokens=True).split()
    )


def page(report: dict[str, Any], records: list[dict[str, Any]], pictures: Path) -> str:
    """A web page with some of the pictures and the answers to them."""
    rows = [
        f'<tr><td><img alt="" src="data:image/png;base64,{_encoded(pictures, record)}"></td>'
        f"{answer_cell(before, right)}{answer_cell(after, right)}</tr>"
        for record, before, after, right in zip(
            records,
            report["before"]["answers"],
            report["after"]["answers"],
            report["expected"],
            strict=True,
        )
    ]
    question = records[0]["messages"][0]["content"][1]["text"]
    scores = {name: report[name]["correct"] for name in ("before", "after")}
    return PAGE.format(
        question=html.escape(question), count=len(records), rows="\n".join(rows[:SHOWN]), **scores
    )


def _encoded(pictures: Path, record: dict[str, Any]) -> str:
    return base64.b64encode(
        (pictures / record["messages"][0]["content"][0]["image"]).read_bytes()
    ).decode()


if __name__ == "__main__":
    evaluate(__doc__ or "", answers, page)
