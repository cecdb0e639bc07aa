# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/conversion, called as functions."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.conversion import compare_models, convert_checkpoints, hf_megatron_roundtrip
from megatron.bridge import AutoBridge
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama

EXAMPLES = Path(__file__).parents[3] / "examples" / "conversion"


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    make_llama(directory, num_hidden_layers=2, tie_word_embeddings=True)
    (directory / "tokenizer.json").unlink()
    return directory


def run(script, *arguments):
    """(exit code, what was printed)."""
    with console().capture() as captured:
        code = script.main([str(argument) for argument in arguments])
    return code, captured.get()


def test_round_trip_compares_every_tensor(hf, tmp_path):
    code, text = run(hf_megatron_roundtrip, "--model-name", hf, "--output-dir", tmp_path / "out")
    assert code == 0
    assert "20 tensors" in text
    assert "all bitwise equal" in text
    assert (tmp_path / "out" / "config.json").is_file()


def test_import_and_export(hf, tmp_path):
    assert run(convert_checkpoints, "--hf-model", hf, "--output-dir", tmp_path / "megatron")[0] == 0
    export = (
        "export",
        "--hf-model",
        hf,
        "--megatron-path",
        tmp_path / "megatron",
        "--hf-path",
        tmp_path / "out",
    )
    assert run(convert_checkpoints, *export)[0] == 0
    for name in ("config.json", "model.safetensors.index.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()


def test_equal_models_compare_equal(hf):
    code, text = run(compare_models, "--hf-model", hf)
    assert code == 0
    assert "no tokenizer: running 32 random tokens" in text
    assert "the models agree" in text


def test_the_layer_where_models_part_is_shown(hf, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(hf)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    with torch.no_grad():
        model[0].decoder.layers[1].mlp.linear_fc2.weight[0] += 1.0
    bridge.save_megatron_model(model, tmp_path / "megatron")
    code, text = run(compare_models, "--hf-model", hf, "--megatron-path", tmp_path / "megatron")
    assert code == 1
    layers = dict(
        line.strip("│ \n").split("│") for line in text.splitlines() if line.startswith("│ layer")
    )
    values = {name.strip(): float(value) for name, value in layers.items()}
    assert values["layer 0"] < 1e-5 < 0.1 < values["layer 1"]
    assert "the models differ" in text


def test_options_of_an_import_stand_in_any_order(hf, tmp_path):
    assert run(convert_checkpoints, "--output-dir", tmp_path / "megatron", "--hf-model", hf)[0] == 0


def test_no_tolerance_is_none(hf):
    code, text = run(compare_models, "--hf-model", hf, "--tolerance", 0)
    assert code == 1
    assert "the models differ (tolerance 0)" in text


def test_both_models_are_compared_in_one_precision(tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=2, dtype=torch.bfloat16)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert (
        run(
            convert_checkpoints,
            "--hf-model",
            tmp_path / "hf",
            "--output-dir",
            tmp_path / "megatron",
        )[0]
        == 0
    )
    code, text = run(
        compare_models, "--hf-model", tmp_path / "hf", "--megatron-path", tmp_path / "megatron"
    )
    assert code == 0, text


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            "--tp 2 --pp 2",
            "--tp 2 x --pp 2 does not divide the 1 running process: start it with torchrun --nproc-",
        ),
        ("--ep 2", r"--ep 2 x --tp 1 x --pp 1 does not divide the 1 running process"),
        ("--etp 2", r"--ep 1 x --etp 2 x --pp 1 does not divide the 1 running process"),
        ("--vp 2", "--vp 2 .* give --pp 2 or more"),
        ("--etp 0", "--etp 0: .* at least 1"),
        ("--tp -1", "--tp -1: .* at least 1"),
    ],
)
def test_layout_that_does_not_fit_the_processes(hf, sizes, message):
    with pytest.raises(UserError, match=message):
        hf_megatron_roundtrip.main(["--model-name", str(hf), *sizes.split()])


def test_the_model_itself_is_no_folder_for_its_checkpoint(hf):
    before = {path.name for path in Path(hf).iterdir()}
    with pytest.raises(
        UserError, match=r"--megatron-path \S+ is a Hugging Face model: choose another folder"
    ):
        convert_checkpoints.main(["import", "--hf-model", str(hf), "--megatron-path", str(hf)])
    assert {path.name for path in Path(hf).iterdir()} == before


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_help_costs_no_torch(script):
    code = f"import sys, runpy; sys.argv = ['x', '--help']; runpy.run_path({str(script)!r}, run_name='__main__')"
    probe = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert (
        "--hf-model" in found.stdout
        or "{import,export}" in found.stdout
        or "COMMAND" in found.stdout
    )
    assert found.stdout.splitlines()[-1] == "False"
