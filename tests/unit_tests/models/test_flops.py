# SPDX-License-Identifier: Apache-2.0
"""Operations of a step: those that PyTorch counts while it runs, and those of published models by hand."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.bridge import AutoBridge
from megatron.bridge.backends.kernels import norms
from megatron.bridge.backends.recurrent import mamba
from megatron.bridge.models.flops import flops_per_token
from tests.families import harness, published
from tests.families.rows import ROWS

LENGTH, CHUNK = 32, 16
ROW = {
    "nemotron_h": "M-M-",
    "nemotron_h_experts": "MEME",
}  # attention's kernel on CPUs is not counted by PyTorch


def model_config(name, **changes):
    config = harness.hf_model(ROWS[name]).config
    config.architectures = [ROWS[name].model]
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def model(name, **changes):
    bridge = AutoBridge.from_hf_config(model_config(name, **changes))
    return bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)


def layers(pattern):
    kinds = {"M": "linear_attention", "-": "mlp", "E": "moe", "*": "full_attention"}
    return {"layers_block_type": [kinds[symbol] for symbol in pattern]}


def counted(chunk, passes=3):
    """What PyTorch counts of a step, for each token; convolutions, in which it errs, by hand."""
    ids = torch.arange(LENGTH)[None] % 100
    with FlopCounterMode(display=False) as counter:
        chunk(input_ids=ids, position_ids=ids, attention_mask=None).sum().backward()
    matrices = sum(
        count
        for kind, count in counter.get_flop_counts()["Global"].items()
        if "convolution" not in str(kind)
    )
    kernels = [
        weight for name, weight in chunk.named_parameters() if name.endswith("conv1d_weight")
    ]
    unseen = sum(
        3 * 2 * (CHUNK - 1) / 2 * (2 * 6 + 12 * 10) for _ in kernels
    )  # masked, but multiplied
    return matrices / LENGTH + passes * 2 * sum(weight.numel() for weight in kernels) - unseen


@pytest.fixture(autouse=True)
def no_recomputation(monkeypatch):
    """Operations of a model do not include those that its scans repeat."""
    monkeypatch.setattr(mamba, "recomputed", lambda function, *args: function(*args))


@pytest.fixture(autouse=True)
def norms_without_matrices(monkeypatch):
    """The package's own norm adds up gradients by a matrix product."""
    norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(norms, "rms_norm", lambda x, gain, eps: norm(x, (x.shape[-1],), gain, eps))


@pytest.mark.parametrize("name", ROW)
def test_it_is_what_pytorch_counts(name):
    chunks = model(name, **layers(ROW[name]))
    assert flops_per_token(chunks, LENGTH) == pytest.approx(counted(chunks[0]), rel=1e-12)


def test_frozen_weights_cost_a_third_less():
    (chunk,) = model("nemotron_h", **layers("M-M-"))
    chunk.decoder.requires_grad_(False)
    assert flops_per_token([chunk], LENGTH) == pytest.approx(counted(chunk, passes=2), rel=1e-12)


@pytest.mark.parametrize("labels", [1, 7])
def test_a_classifier_has_no_padded_vocabulary(labels):
    def total(**changes):
        provider = AutoBridge.from_hf_config(model_config("nemotron_h")).to_megatron_provider(False)
        for key, value in {
            "head": "sequence_classification",
            "num_labels": labels,
            **changes,
        }.items():
            setattr(provider, key, value)
        return flops_per_token(provider.provide_distributed_model(wrap_with_ddp=False), LENGTH)

    width = ROWS["nemotron_h"].config["hidden_size"]
    assert total() == total(should_pad_vocab=True, make_vocab_size_divisible_by=4096)
    assert total(num_labels=labels + 2) - total() == 3 * 2 * 2 * width


@pytest.mark.parametrize("window", [None, 8])
def test_attention_sees_what_is_before_it(window):
    def total(length):
        (chunk,) = model("mistral_window", sliding_window=window)
        return flops_per_token([chunk], length)

    config = ROWS["mistral_window"].config
    heads, width, depth = (
        config["num_attention_heads"],
        config["head_dim"],
        config["num_hidden_layers"],
    )

    def seen(length):
        return sum(min(place + 1, window or length) for place in range(length)) / length

    difference = 3 * depth * heads * 4 * width * (seen(40) - seen(20))
    assert total(40) - total(20) == pytest.approx(difference, rel=1e-9)


def test_a_published_hybrid_by_hand():
    config = json.loads(
        (Path(published.__path__[0]) / "nvidia--Nemotron-H-8B-Base-8K.json").read_text()
    )
    inner, states, length, chunk = 128 * 64, 8 * 128, 8192, 128
    mamba = 2 * (4096 * (2 * inner + 2 * states + 128) + 4 * (inner + 2 * states) + inner * 4096)
    mamba += 2 * (chunk + 1) / 2 * (states + inner) + 4 * inner * 128
    attention = 2 * 4096 * 128 * (32 + 8 + 8 + 32) + 4 * 32 * 128 * (length + 1) / 2
    mlp = 2 * 2 * 4096 * 21504
    pattern = config["hybrid_override_pattern"]
    forward = {"M": mamba, "*": attention, "-": mlp}
    expected = 3 * (sum(forward[symbol] for symbol in pattern) + 2 * 4096 * 131072)
    provider = AutoBridge.from_hf_config(hf_config(config)).to_megatron_provider(load_weights=False)
    assert flops_per_token(provider.meta_model(), length) == pytest.approx(expected, rel=1e-12)


def hf_config(values):
    from transformers import NemotronHConfig

    return NemotronHConfig(**values)
