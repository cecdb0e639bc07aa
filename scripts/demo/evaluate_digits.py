# SPDX-License-Identifier: Apache-2.0
"""Ask a model about recordings of held-out voices before and after training, with transformers' own code alone.

Writes a report as JSON and a web page with the recordings. It prints numbers and judges nothing.
"""

import base64
import html
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
)
from transformers.audio_utils import load_audio

from scripts.demo.evaluation import answer_cell, evaluate

NEW_TOKENS = 16
PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>Recordings and answers</title>
<style>body {{ font-family: sans-serif; color: #222; background: #fff; }} td, th {{ padding: 4px 12px; }}
audio {{ height: 2em; }} .wrong {{ color: #b00; }} .right {{ color: #070; }}</style>
</head><body><h1>{question}</h1><p>Correct answers about {count} recordings of voices that were never trained on:
{before} before training, {after} after it.</p><table><tr><th>recording</th><th>before</th><th>after</th></tr>
{rows}
</table></body></html>
"""


@torch.no_grad()
def answers(directory: Path, records: list[dict[str, Any]], root: Path) -> list[str]:
    """What a model says about the recording of each record."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    extractor: Any = AutoFeatureExtractor.from_pretrained(directory)
    processor: Any = Qwen2AudioProcessor(extractor, tokenizer, tokenizer.chat_template)
    model: Any = Qwen2AudioForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return [answer(model, processor, record["messages"][:1], root) for record in records]


def answer(model: Any, processor: Any, messages: list[dict[str, Any]], root: Path) -> str:
    """The most likely answer to a question about one recording."""
    rate = processor.feature_extractor.sampling_rate
    file = root / messages[0]["content"][0]["audio"]
    sound = load_audio(str(file), sampling_rate=rate, backend="soundfile")
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = processor(text=text, audio=sound, sampling_rate=rate, return_tensors="pt")
    found = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    said = processor.tokenizer.decode(
        found[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return " ".join(said.split())


def page(report: dict[str, Any], records: list[dict[str, Any]], root: Path) -> str:
    """A web page with the recordings and the answers to them."""
    rows = []
    for number, record in enumerate(records):
        question, expected = record["messages"][0]["content"], report["expected"][number]
        sound = base64.b64encode((root / question[0]["audio"]).read_bytes()).decode()
        cells = [
            answer_cell(report[name]["answers"][number], expected) for name in ("before", "after")
        ]
        player = f'<audio controls src="data:audio/wav;base64,{sound}"></audio>'
        rows.append(f"<tr><td>{player}</td>{''.join(cells)}</tr>")
    return PAGE.format(
        question=html.escape(records[0]["messages"][0]["content"][1]["text"]),
        count=len(records),
        before=report["before"]["correct"],
        after=report["after"]["correct"],
        rows="\n".join(rows),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # a model so small is slower with more
    evaluate(__doc__ or "", answers, page)
