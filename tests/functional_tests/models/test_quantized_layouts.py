# SPDX-License-Identifier: Apache-2.0
"""Quantized exports do not depend on the layout: every rank quantizes full tensors."""

import hashlib

import pytest

from megatron.bridge import AutoBridge
from tests.families import harness


def sizes(layout):
    return {name: value for name, value in harness.LAYOUTS[layout].items() if "p2p" not in name}


def export(case, layout, folder, quantize):
    """Convert and export, one process or several."""
    options = {"group_size": 16} if quantize == "fp8-block" else {}
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    mp_overrides = sizes(layout) if layout else None
    bridge.export_ckpt(
        folder / "megatron",
        folder / (layout or "one"),
        show_progress=False,
        mp_overrides=mp_overrides,
        quantize=quantize,
        **options,
    )


def export_from_memory(case, layout, folder, quantize):
    bridge, model = harness.build(case, layout)
    bridge.save_hf_pretrained(
        model, folder / f"{layout}-memory", show_progress=False, quantize=quantize
    )


def hashes(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.suffix in (".safetensors", ".json") and not path.name.startswith(".")
    }


@pytest.mark.parametrize(
    ("name", "quantize", "layouts"),
    [
        ("qwen3", "fp8-block", ["tp2", "pp2"]),
        ("mixtral", "fp8-tensor", ["ep2", "etp2"]),
        ("llama_tied", "int8", ["tp2"]),
    ],
)
def test_ranks_write_what_one_process_writes(
    two_workers, family_case, tmp_path, name, quantize, layouts
):
    case = family_case(name)
    AutoBridge.import_ckpt(case.checkpoint, tmp_path / "megatron", show_progress=False)
    export(case, None, tmp_path, quantize)
    for layout in layouts:
        two_workers.run(export, case, layout, tmp_path, quantize)
        assert hashes(tmp_path / layout) == hashes(tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("gpt_oss_mxfp4", ["ep2", "tp2"]), ("qwen3_fp8", ["tp2"]), ("deepseek_v3_fp8", ["ep2"])],
)
def test_what_was_not_trained_is_as_in_the_source(
    two_workers, family_case, tmp_path, name, layouts
):
    case = family_case(name)
    for layout in layouts:
        two_workers.run(export_from_memory, case, layout, tmp_path, "source")
        written = hashes(tmp_path / f"{layout}-memory")
        assert written == {name: hashes(case.checkpoint)[name] for name in written}
        assert any(name.endswith(".safetensors") for name in written)
