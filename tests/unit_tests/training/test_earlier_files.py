# SPDX-License-Identifier: Apache-2.0
"""What an earlier version wrote is read, and a run of it goes on as if it had never stopped."""

import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file

from megatron.bridge.cli.main import main
from megatron.bridge.models.conversion.pretrained import tokenizer_of
from tests.fixtures.arithmetic import fingerprint
from tests.unit_tests.project.tree import ROOT
from tests.workers import forget_model_parallel

V0_1 = ROOT / "tests/fixtures/v0.1"


@pytest.fixture
def files(tmp_path, monkeypatch, one_process):
    """The files of version 0.1 in a folder of their own, which is the working directory."""
    shutil.copytree(V0_1, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(line):
    """Run ``megatron-bridge`` in this process."""
    assert main(line.split()) == 0, line
    forget_model_parallel()


def numbers(path, after=0):
    """What a run logged ``after`` a step: losses and norms of the gradients by kind and step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    named = {
        (row["kind"], row["step"], name): row.get(name)
        for row in rows
        for name in ("lm loss", "grad norm")
    }
    return {key: value for key, value in named.items() if key[1] > after and value is not None}


def settings(text):
    """The values of a config's text by their dotted keys."""
    return dict(flat(yaml.safe_load(text), ()))


def flat(value, keys):
    """Leaves with the path to each; classes and functions by their last names, which may move."""
    if isinstance(value, dict) and not value.keys() & {"_call_", "_tuple_", "_path_"}:
        for key, item in value.items():
            yield from flat(item.rpartition(".")[2] if key == "_target_" else item, (*keys, key))
    elif isinstance(value, dict) and "_call_" in value:
        yield keys, value["_target_"].rpartition(".")[2]
    else:
        yield keys, next(iter(value.values())) if isinstance(value, dict) else value


def assert_settled_as_before(text, folder, changed=()):
    """Every value of the earlier run's resolved config is in this one's, but for those that are ``changed``."""
    now = settings(text)
    before = settings((folder / "run_config.yaml").read_text()) | dict(changed)
    assert {key: now.get(key, "missing") for key in before} == before


def assert_same_numbers(found, expected):
    """Bitwise where kernels compute as the recording ones did; others sum in another order."""
    assert found.keys() == expected.keys()
    if fingerprint() == (V0_1 / "arithmetic.txt").read_text().strip():
        assert found == expected
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("folder", ["pretrain", "lora"])
def test_a_run_goes_on_from_its_own_config(files, folder):
    prepared = state_of(files / "prepared")
    command(f"train --config {folder}/run_config.yaml --mode {folder}")
    expected = numbers(V0_1 / folder / "uninterrupted.jsonl", after=3)
    assert_same_numbers(numbers(files / folder / "metrics.jsonl"), expected)
    assert state_of(files / "prepared") == prepared
    assert_settled_as_before((files / folder / "run_config.yaml").read_text(), V0_1 / folder)


def test_a_checkpoint_speaks_with_the_tokenizer_of_its_run(files):
    assert tokenizer_of("pretrain") == "base"
    command(
        "generate pretrain --prompt The --max-new-tokens 2 --kv-memory 16MB"
    )  # a text needs a tokenizer


def test_settings_on_top_of_a_recipe_mean_the_same(files, capsys):
    recipe = "--recipe llama32_1b_pretrain_config --hf-model base --data corpus dataset.split=8,2,2"
    command(
        f"train {recipe} --config settings.yaml checkpoint.save=pretrain --dry-run --world-size 1"
    )
    better = {
        ("model", "deallocate_pipeline_outputs"): True,
        ("scheduler", "lr_warmup_init"): None,
    }
    assert_settled_as_before(capsys.readouterr().out, V0_1 / "pretrain", better)


def state_of(folder):
    """Every file below a folder and when it was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_prepared_data_is_used_as_it_is(files, capsys):
    before = state_of(files / "prepared"), state_of(files)
    short = (
        "dataset.seq_length=16 model.seq_length=16 dataset.prepared_dir=prepared dataset.do_test=false "
        "dataset.truncation=right"  # was the default of recipes
    )
    command(
        f"data prepare llama32_1b_finetune_config --data chats --hf-model base validation.eval_iters=1 {short}"
    )
    command(
        "data preprocess --input corpus.jsonl --output-prefix corpus --append-eod --tokenizer-model base"
    )
    assert (state_of(files / "prepared"), state_of(files)) == before


def test_adapters_of_a_run_and_of_the_peft_library_are_the_same(files):
    command("adapter export --adapter lora --hf-path exported")
    command("adapter merge --adapter lora --hf-path merged")
    command("adapter merge --adapter adapter --hf-model base --hf-path again")
    for ours, theirs, name in (
        ("exported", "adapter", "adapter_model"),
        ("merged", "again", "model"),
    ):
        found, expected = (
            load_file(files / folder / f"{name}.safetensors") for folder in (ours, theirs)
        )
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected)
