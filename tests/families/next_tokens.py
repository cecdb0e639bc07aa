# SPDX-License-Identifier: Apache-2.0
"""A toy DeepSeek-V3 with two layers of multi-token prediction, stored as on the hub.

The reference is transformers' own ``MtpModel``, which reads the layers by the hub's names. The losses are those of
Megatron-Core: the layer of depth d, from the hidden state of token t and the embedding of token t + d, predicts
token t + d + 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from tests.families import harness
from tests.families.hub_names import by_expert
from tests.families.row import Row
from tests.families.rows import ROWS

DEPTHS = 2
LOSS_FACTOR = 0.1  # Megatron-Core's default
_V3 = ROWS["deepseek_v3"]
ROW = Row("next_tokens", _V3.model, {**_V3.config, "num_nextn_predict_layers": DEPTHS})
_LAYERS = _V3.config["num_hidden_layers"]
_FILE = "model-mtp.safetensors"


@dataclass(frozen=True)
class Case(harness.Case):
    """The toy and the folder with its reference."""

    @property
    def row(self) -> Row:
        return ROW


def make_reference(directory: Path) -> Case:
    """Checkpoint, logits of the model itself, and gradients of all losses together."""
    case = Case(ROW.name, directory)
    harness.save(harness.hf_model(ROW), case.checkpoint)
    (case.checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    (case.checkpoint / "README.md").write_text("The card of a toy.\n")
    add_layers(case.checkpoint)
    model, mtp = load(case.checkpoint)
    ids, labels = case.batch
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    for depth, logits in enumerate(next_logits(mtp, output.hidden_states[-1], ids), 1):
        seen, wanted = logits[:, : -depth - 1], ids[:, depth + 1 :]
        loss = loss + LOSS_FACTOR / DEPTHS * F.cross_entropy(seen.flatten(0, 1), wanted.flatten())
    loss.backward()
    save_file({"logits": output.logits.detach()}, directory / "expected.safetensors")
    own = gradients(mtp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.grad
        for name, buffer in model.named_buffers():
            buffer.mul_("e_score_correction_bias" not in name)
    harness.save(model, directory / "gradients")
    save_file(
        {name: value.contiguous().clone() for name, value in own.items()},
        directory / "gradients" / _FILE,
    )
    return case


def add_layers(checkpoint: Path) -> None:
    """Write the layers beside the other weights, under the hub's names."""
    stored = harness.read_weights(checkpoint)
    last = f"model.layers.{_LAYERS - 1}."
    width = stored["model.norm.weight"].shape[0]
    shapes = {
        name.removeprefix(last): value.shape
        for name, value in stored.items()
        if name.startswith(last)
    }
    shapes |= {f"{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = (width, 2 * width)
    generator, tensors = torch.Generator().manual_seed(5), {}
    for depth in range(DEPTHS):
        for name, shape in shapes.items():
            value = torch.randn(*shape, generator=generator) * (
                0.2 if len(shape) == 1 else shape[-1] ** -0.5
            )
            tensors[f"model.layers.{_LAYERS + depth}.{name}"] = value + ("norm" in name)
        tensors |= copies(depth, stored)
    save_file(
        {name: value.clone() for name, value in tensors.items()},
        checkpoint / _FILE,
        {"format": "pt"},
    )
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, _FILE)
    path.write_text(json.dumps(index))


def copies(depth: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The embedding and the output layer, as the layer of ``depth`` has them."""
    layer = f"model.layers.{_LAYERS + depth}"
    return {
        f"{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{layer}.shared_head.head.weight": tensors["lm_head.weight"],
    }


def load(checkpoint: Path) -> tuple[Any, Any]:
    """Transformers' model and its layers of multi-token prediction."""
    model = DeepseekV3ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    # it knows where the layers of the published sizes are
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{_LAYERS + d}\..*" for d in range(DEPTHS)
    ]
    return model.eval(), MtpModel.from_pretrained(model).eval()


def next_logits(mtp: Any, hidden: Tensor, ids: Tensor) -> list[Tensor]:
    """Logits [rows, sequence, vocabulary] of each depth; behind the end of the sequence comes token 0."""
    positions = torch.arange(ids.shape[1])[None]
    found = []
    for depth in range(DEPTHS):
        ids = F.pad(ids[:, 1:], (0, 1))
        hidden = mtp.forward_layer(depth, hidden, positions, None, input_ids=ids)
        found.append(mtp._project_to_logits(hidden))
    return found


def gradients(mtp: Any) -> dict[str, Tensor]:
    """Gradients under the hub's names."""
    found: dict[str, Tensor] = {}
    for depth, layer in enumerate(mtp.layers):
        for name, parameter in layer.named_parameters():
            theirs = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            for hub, value in by_expert(theirs, parameter.grad):
                found[f"model.layers.{_LAYERS + depth}.{hub}"] = value
    return found
