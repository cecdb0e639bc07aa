# SPDX-License-Identifier: Apache-2.0
"""Models that llm-compressor calibrates: read by this project, and nearer to the full model than rounded ones."""

from pathlib import Path

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from tests.toy_models import make_llama
from tests.unit_tests.cli.test_calibrate import LETTERS, add_tokenizer, write_texts

BESIDE = Path(__file__).parents[3] / ".cache/calibrate"  # where scripts/extra.sh installs it
pytestmark = pytest.mark.skipif(
    not (BESIDE / "llmcompressor").is_dir(),
    reason="llm-compressor is not installed: run scripts/extra.sh calibrate",
)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}


def logits(folder):
    """Logits of Megatron's model for a text of the calibration."""
    chunks = AutoBridge.from_hf_pretrained(folder).to_megatron_model(wrap_with_ddp=False)
    ids = torch.arange(len(LETTERS))[None]
    with torch.no_grad():
        return chunks[0](input_ids=ids, position_ids=ids, attention_mask=None).float()


@pytest.mark.parametrize(
    ("scheme", "method", "rounded_as"),
    [
        ("W4A16", "gptq", "int4"),
        pytest.param("W4A16_ASYM", "awq", "int4", marks=pytest.mark.slow),
        pytest.param("NVFP4", "observe", "nvfp4", marks=pytest.mark.slow),
        pytest.param("W8A8", "gptq", "int8", marks=pytest.mark.slow),
        pytest.param("FP8_BLOCK", "observe", "fp8-block", marks=pytest.mark.slow),
        pytest.param("MXFP4", "observe", "mxfp4", marks=pytest.mark.slow),
    ],
)
def test_what_llm_compressor_writes(tmp_path, monkeypatch, scheme, method, rounded_as):
    source = tmp_path / "hf"
    make_llama(source, dtype=torch.bfloat16, shard_size="1GB", **SIZES, **HEADS)
    add_tokenizer(source)
    texts = write_texts(tmp_path / "texts.jsonl", count=40)
    monkeypatch.setenv("PYTHONPATH", str(BESIDE))
    words = ("--texts", str(texts), "--scheme", scheme, "--method", method, "--seq-length", "27")
    # llm-compressor's AWQ cannot leave out a single matrix: it divides by the number of its losses
    kept = [] if method == "awq" else ["model.layers.0.mlp.down_proj.weight"]
    options = [*words, *(["--keep-high", *kept] if kept else [])]
    out = tmp_path / "out"
    arguments = ["calibrate", "--hf-model", str(source), "--hf-path", str(out), *options]
    assert main(arguments) == 0

    bridge = AutoBridge.from_hf_pretrained(source)
    full = bridge.hf_pretrained.state
    read = AutoBridge.from_hf_pretrained(out).hf_pretrained.state
    assert set(read) == set(full)
    assert len(read.packed) == 2 * 7 - len(kept)
    assert all(torch.equal(read[name], full[name]) for name in kept)
    rounded = tmp_path / "rounded"
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(
        chunks, rounded, show_progress=False, quantize=rounded_as, keep_high=kept
    )
    expected = logits(source)
    error = (logits(out) - expected).square().mean()
    error_of_rounding = (logits(rounded) - expected).square().mean()
    if method == "observe":
        assert error < 1.5 * error_of_rounding
    else:
        assert error < error_of_rounding
