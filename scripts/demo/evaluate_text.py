# SPDX-License-Identifier: Apache-2.0
"""Evaluate the demo: is the exported model the trained one, and is its loss on held-out text lower?

Writes a report as JSON and a plot of the loss; it prints numbers and decides nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from megatron.bridge import AutoBridge

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

WINDOW = 512
WINDOWS = 8
PROMPT = "HAMLET.\nTo-night, my lord,"
NEW_TOKENS = 32
# Both sides compute in fp32, in different orders of summation.
RELATIVE_TOLERANCE = 1e-4


def held_out_windows(path: Path, tokenizer: Any) -> torch.Tensor:
    """Token ids [windows, tokens] spread evenly over the text."""
    ids = torch.tensor(tokenizer(path.read_text(), verbose=False).input_ids)
    starts = torch.linspace(0, len(ids) - WINDOW, WINDOWS).long()
    return torch.stack([ids[start : start + WINDOW] for start in starts.tolist()])


def measure(
    model_dir: Path, windows: torch.Tensor, tokenizer: Any
) -> tuple[float, torch.Tensor, str]:
    """Held-out loss, logits of the first window and a continuation, all by transformers in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss.item() for window in windows]
        logits = model(windows[:1]).logits
        continued = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    text = tokenizer.decode(continued[0][prompt.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(losses) / len(losses), logits, text


def megatron_logits(hugging_face: Path, checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the trained Megatron checkpoint, in fp32 in this one process.

    The export rounds the weights of a run in fp32 to the dtype of the Hugging Face model, and so does this function.
    """
    bridge = AutoBridge.from_hf_pretrained(str(hugging_face))
    (model,) = bridge.load_megatron_model(str(checkpoint), mp_overrides=None, wrap_with_ddp=False)
    exported = AutoConfig.from_pretrained(hugging_face).dtype
    positions = torch.arange(tokens.shape[1])[None]
    model.to(exported).float().eval()
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=positions, attention_mask=None)


def plot(metrics: list[dict[str, Any]], held_out: tuple[float, float], path: Path) -> None:
    """The loss of every step, on validation text while training, and on the held-out play before and after."""
    steps, losses = series(metrics, "train")
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(steps, losses, label="training text")
    axes.plot(*series(metrics, "validation"), "o-", label="validation text")
    axes.plot([0, steps[-1]], held_out, "s:", label="held-out play, before and after")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel="optimizer step", ylabel="loss (nats per token)", title="SmolLM2-135M on Shakespeare"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def series(metrics: list[dict[str, Any]], kind: str) -> tuple[list[int], list[float]]:
    """Steps and losses of one kind of entry."""
    entries = [entry for entry in metrics if entry["kind"] == kind]
    return [entry["step"] for entry in entries], [entry["lm loss"] for entry in entries]


def arguments() -> argparse.Namespace:
    """What to compare and where to write."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("before", "after", "megatron", "held-out", "metrics", "report", "plot"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Measure, compare, report."""
    args = arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.before)
    windows = held_out_windows(args.held_out, tokenizer)
    loss_before, _, text_before = measure(args.before, windows, tokenizer)
    loss_after, logits, text_after = measure(args.after, windows, tokenizer)
    trained = megatron_logits(args.after, args.megatron, windows[:1])
    scale = logits.abs().max().item()
    metrics = [json.loads(line) for line in args.metrics.read_text().splitlines()]
    plot(metrics, (loss_before, loss_after), args.plot)
    report = {
        "samples": [entry["consumed samples"] for entry in metrics if entry["kind"] == "train"][-1],
        "loss_before": loss_before,
        "loss_after": loss_after,
        "logit_difference": (trained - logits).abs().max().item(),
        "logit_scale": scale,
        "logit_tolerance": RELATIVE_TOLERANCE * scale,
        "prompt": PROMPT,
        "text_before": text_before,
        "text_after": text_after,
    }
    args.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))  # noqa: T201 - the log of this stage


if __name__ == "__main__":
    main()
