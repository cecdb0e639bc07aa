# SPDX-License-Identifier: Apache-2.0
"""An installed package trains, exports and launches without the files of a checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from tests.unit_tests.project.tree import ROOT

OFFLINE = ("error sending request", "dns error", "network connectivity is disabled")
RECIPE = ("--recipe", "llama32_1b_pretrain_config")
TOY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.ffn_hidden_size=64", "model.vocab_size=64"),
    *("model.seq_length=32", "dataset.seq_length=32", "tokenizer.tokenizer_type=NullTokenizer"),
    *("tokenizer.tokenizer_model=null", "tokenizer.vocab_size=64", "train.train_iters=2"),
    *("train.global_batch_size=2", "train.micro_batch_size=1", "validation.eval_iters=0"),
    *("mixed_precision=fp32", "checkpoint.save=run", "model.tensor_model_parallel_size=1"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the content of the wheel, and the environment in which Python finds it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [ROOT / "scripts/uv.sh", "build", "--wheel", "--quiet", "--out-dir", folder, ROOT]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    if any(sign in built.stderr.lower() for sign in OFFLINE):
        pytest.skip("offline")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder / "site")
    paths = [str(folder / "site"), sysconfig.get_paths()["purelib"]]
    return folder, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(installed, *words):
    folder, environment = installed
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_package_trains_and_exports(installed):
    folder, _ = installed
    code = "import megatron.bridge; print(megatron.bridge.__file__)"
    assert run(installed, "-c", code).startswith(str(folder / "site"))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    run(installed, *torchrun, "-m", "megatron.bridge", "train", *RECIPE, *TOY)
    assert (folder / "run" / "iter_0000002").is_dir()
    export = ("export", "--megatron-path", "run", "--hf-path", "out")
    run(installed, "-m", "megatron.bridge", *export, "--architecture", "LlamaForCausalLM")
    assert json.loads((folder / "out" / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.slow
def test_launch_needs_no_checkout(installed):
    folder, _ = installed
    dry = ("launch", "--local", "--devices", "2", *RECIPE, "--dry-run")
    said = run(installed, "-m", "megatron.bridge", *dry)
    script = folder / "site" / "megatron" / "bridge" / "cli" / "entry" / "run_recipe.py"
    assert str(script) in said
    run(installed, str(script), *RECIPE, *TOY, "checkpoint.save=launched")  # as torchrun starts it
    assert (folder / "launched" / "iter_0000002").is_dir()
