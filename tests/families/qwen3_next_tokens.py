# SPDX-License-Identifier: Apache-2.0
"""A toy Qwen3-Next whose layer of multi-token prediction is converted and trained, and its reference."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Qwen3NextForCausalLM

from tests.families import harness
from tests.families.next_tokens import LOSS_FACTOR
from tests.families.qwen3_next_layer import FILE, NextToken, add_layer
from tests.families.row import Row
from tests.families.rows import ROWS

ROW = Row(
    "qwen3_next_tokens",
    "Qwen3NextForCausalLM",
    ROWS["qwen3_next"].config,
    provider={"mtp_num_layers": 1},
)


@dataclass(frozen=True)
class Case(harness.Case):
    """The toy and the folder with its reference."""

    @property
    def row(self) -> Row:
        return ROW


def make_reference(directory: Path) -> Case:
    """Checkpoint, logits of the model itself, and gradients of both losses together."""
    case = Case(ROW.name, directory)
    harness.save(harness.hf_model(ROW), case.checkpoint)
    (case.checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    (case.checkpoint / "README.md").write_text("The card of a toy.\n")
    add_layer(case.checkpoint)
    model = Qwen3NextForCausalLM.from_pretrained(
        case.checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    layer = NextToken(model.config)
    ids, labels = case.batch
    output = model.eval()(input_ids=ids, use_cache=False, output_hidden_states=True)
    seen, wanted = layer(model, output.hidden_states[-1], ids)[:, :-2], ids[:, 2:]
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    (loss + LOSS_FACTOR * F.cross_entropy(seen.flatten(0, 1), wanted.flatten())).backward()
    save_file({"logits": output.logits.detach()}, directory / "expected.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.grad
    harness.save(model, directory / "gradients")
    save_file(layer.named("grad"), directory / "gradients" / FILE)
    return case
