# SPDX-License-Identifier: Apache-2.0
"""What ``megatron-bridge train`` makes of its arguments, and what it says of wrong ones."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from megatron.bridge.autotune.meta_model import parameter_count
from megatron.bridge.cli.support.recipe_table import model_and_size
from megatron.bridge.recipes.catalog import catalog, find
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config.serialize import load_yaml
from tests import hub_cache
from tests.toy_run import save_llama
from tests.unit_tests.cli.test_main import run
from tests.unit_tests.project.tree import ROOT
from tests.workers import leave

RECIPE = ("train", "--recipe", "llama32_1b_pretrain_config")
FINETUNE = ("train", "--recipe", "llama32_1b_finetune_config")
TOKENIZER = ROOT / "tutorials" / "data" / "tokenizer"
SMALL_MODEL = ("train", "--recipe", "smollm2_135m_finetune_config")


def dry_run(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--dry-run")
    would_not_run = "\n# the run would be refused: " in out or "does NOT fit" in out
    assert (code, err) == (int(would_not_run), "")
    return load_yaml(out), out


def test_dry_run_prints_a_config_with_origins(capsys):
    config, out = dry_run(
        capsys, *RECIPE, "train.train_iters=7", "model.tensor_model_parallel_size=2"
    )
    assert isinstance(config, ConfigContainer)
    assert config.train.train_iters == 7
    assert "  train_iters: 7  # command line\n" in out
    assert "  num_layers: 16  # recipe\n" in out
    assert "  grad_reduce_in_fp32: true  # derived\n" in out
    assert "  hidden_dropout: 0.0  # recipe\n" in out


def test_experts_that_cannot_be_cut_are_whole_unless_a_user_cuts_them(capsys):
    gpt_oss = ("train", "--recipe", "gpt_oss_20b_pretrain_config", "--world-size", "16")
    _, out = dry_run(capsys, *gpt_oss, "model.expert_tensor_parallel_size=null")
    assert "expert groups of 4: 0, 1, 2, 3; 8 of 32 experts on each rank" in out
    assert "each cut in" not in out
    code, _, err = run(capsys, *gpt_oss, "--dry-run", "model.expert_tensor_parallel_size=2")
    assert code == 1
    assert "expert_tensor_parallel_size=2 cannot cut experts" in err


def test_dry_run_says_what_the_config_means(capsys):
    _, out = dry_run(capsys, *RECIPE, "model.tensor_model_parallel_size=2", "--world-size", "16")
    time, split = time_lines(out)
    assert [line for line in out.splitlines() if line.startswith("#")] == [
        "# pretrain from llama32_1b_pretrain_config",
        "# changed: model.tensor_model_parallel_size=1 -> 2",
        "# model: 1,235,814,400 parameters, 16 layers, hidden size 2048",
        "# layout: 16 processes = tensor 2 x pipeline 1 x context 1 x data 8",
        "# run: 250,000 steps, 1,048,576,000,000 tokens; each step 512 samples x 8192 tokens = 4,194,304 tokens, "
        "in 64 microbatches of 1 on each of 8 replicas",
        "#",
        "# ranks     data 0  data 1  data 2  ...  data 7",
        "# stage 0   0-1     2-3     4-5     ...  14-15",
        "# in a cell: tensor groups of 2: 0-1",
        "# nodes of 8 GPUs: tensor groups stay within one node; data groups span several nodes",
        "#",
        *memory_lines(out),
        "#",
        "# compute: 3.79e+16 model FLOPs per step, 9.46e+21 in total, without recomputation",
        time,
        split,
        "#",
        "# note: no data was given: this run trains on mock data (use --data PATH for real data)",
        "# note: checkpoint.save is not set: this run saves no checkpoint (set checkpoint.save=DIR)",
    ]


def time_lines(out):
    """Two lines, of which the numbers are tested where they are made."""
    lines = out.splitlines()
    time = next(line for line in lines if line.startswith("# time: "))
    assert "16 x H100 80GB" in time
    assert time.endswith("of the bf16 peak (predicted, not measured)")
    split = lines[lines.index(time) + 1]
    assert split.startswith("# where the time of the busiest stage goes: matrix products ")
    return time, split


def memory_lines(out):
    """Those of tensors, the verdict, and what a GPU holds; the numbers are tested where they are made."""
    lines = out.splitlines()
    start = lines.index(
        "# memory per rank: states counted on the sharded model, activations estimated"
    )
    head, row, verdict = lines[start + 1 : start + 4]
    assert (
        " ".join(head.split())
        == "# parameters weights gradients optimizer activations total GB layers"
    )
    assert row.split()[1:4] == ["stage", "0", "617,940,992"]
    assert row.endswith("embedding, layers 0-15, loss")
    assert verdict.endswith("GB of H100 80GB: fits")
    parts = lines[start + 4 : start + 9]
    names = [
        "tensors",
        "CUDA context",
        "libraries",
        "NCCL, 5 communicators",
        "fragmentation (5% of tensors, assumed)",
    ]
    assert [line.partition(" GB  ")[2] for line in parts] == names
    return lines[start : start + 9]


def test_dry_run_names_what_the_recipe_did_not_have(capsys):
    _, out = dry_run(capsys, *FINETUNE, "--mode", "lora", "checkpoint.pretrained_checkpoint=base")
    assert "# not in the recipe: peft.dim=16\n" in out
    assert "# changed: optimizer.lr=1e-05 -> 0.0001\n" in out
    assert "# removed: peft\n" in out


DISTILL = ("train", "--recipe", "smollm2_50m_distill_config", "train.global_batch_size=64")


def work(out):
    """Floating-point operations of a step."""
    return float(re.search(r"# compute: (\S+) model FLOPs per step", out)[1])


def test_dry_run_counts_the_teacher(capsys):
    """A third of what it would take to train it."""
    taught, alone, teacher = (
        dry_run(capsys, *arguments)[1]
        for arguments in (
            DISTILL,
            (*DISTILL, "distill.teacher=nobody/knows"),
            ("train", "--recipe", "smollm2_135m_pretrain_config", "train.global_batch_size=64"),
        )
    )
    assert work(taught) - work(alone) == pytest.approx(work(teacher) / 3, rel=0.02)
    assert "activations  teacher  total GB" in taught
    assert "teacher  total GB" not in alone
    note = "# note: distill.teacher=nobody/knows is not on this machine: memory and compute are those of the student"
    assert note in alone
    assert "is not on this machine" not in taught


LAYOUT_405B = (
    *("train", "--recipe", "llama31_405b_pretrain_config"),
    "model.tensor_model_parallel_size=8",
    "model.pipeline_model_parallel_size=8",
    "model.virtual_pipeline_model_parallel_size=4",
    "model.context_parallel_size=4",
)


def test_ranks_are_drawn(capsys):
    _, out = dry_run(capsys, *LAYOUT_405B, "--world-size", "1024")
    lines = out.splitlines()
    start = lines.index("# ranks     data 0    data 1    data 2    data 3")
    assert lines[start + 1] == "# stage 0   0-31      32-63     64-95     96-127"
    assert lines[start + 8].startswith("# stage 7   896-927   928-959")
    assert lines[start + 9 : start + 11] == [
        "# in a cell: tensor groups of 8: 0-7; context groups of 4: 0, 8, 16, 24",
        "# nodes of 8 GPUs: tensor groups stay within one node; context, data and pipeline groups span several nodes",
    ]


def test_picture_is_that_of_megatron():
    """The groups that Megatron-Core makes, of a layout in which every dimension is above one."""
    from megatron.core.parallel_state import RankGenerator

    from megatron.bridge.cli.support import summary
    from tests.toy_run import toy_config

    config = toy_config()
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        setattr(config.model, f"{name}_parallel_size", 2)
    config.model.num_moe_experts = 4
    lines = list(summary.rank_table(config, 16))
    dense = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=2, ep=2, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    cells = [
        cell.split("-") for line in lines if line.startswith("stage") for cell in line.split()[2:]
    ]
    drawn = sorted([list(range(int(first), int(last) + 1)) for first, last in cells])
    assert drawn == sorted(dense.get_ranks("tp-cp"))
    assert f"context groups of 2: {', '.join(map(str, dense.get_ranks('cp')[0]))}" in "\n".join(
        lines
    )
    assert f"expert groups of 2: {', '.join(map(str, expert.get_ranks('ep')[0]))}" in "\n".join(
        lines
    )
    assert [line.split()[:2] for line in lines if line.startswith("stage")] == [
        ["stage", "0"],
        ["stage", "1"],
    ]


def test_dry_run_assumes_the_gpus_of_the_recipe(capsys):
    _, out = dry_run(capsys, *LAYOUT_405B)
    assert (
        "# layout: 1024 processes = tensor 8 with sequence parallelism x pipeline 8 of 4 interleaved stages x "
        "context 4 x data 4\n" in out
    )
    assert "# model: 405,853,388,800 parameters" in out
    assert "# (for 1024 processes; set another number with --world-size N)\n" in out


def test_printed_config_is_read_again(capsys, tmp_path):
    config, out = dry_run(capsys, *RECIPE, "optimizer.lr=1e-5")
    path = tmp_path / "run.yaml"
    path.write_text(out)
    again, text = dry_run(
        capsys, "train", "--config", str(path), "--world-size", "8", "train.train_iters=3"
    )
    assert (again.optimizer.lr, again.train.train_iters) == (1e-5, 3)
    assert f"lr: 1.0e-05  # file {path}\n" in text
    again.train.train_iters, again.scheduler.lr_decay_iters = 250_000, 250_000
    assert again == config


def test_settings_of_a_file_lie_between_recipe_and_command_line(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train:\n  train_iters: 5\n  global_batch_size: 64\noptimizer: {lr: 1e-5}\n")
    config, out = dry_run(capsys, *RECIPE, "--config", str(path), "train.train_iters=6")
    assert (config.train.train_iters, config.train.global_batch_size, config.optimizer.lr) == (
        6,
        64,
        1e-5,
    )
    assert f"  global_batch_size: 64  # file {path}\n" in out
    assert "  train_iters: 6  # command line\n" in out


def test_references_are_resolved_behind_the_command_line(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "scheduler: {lr_decay_iters: '${train.train_iters}'}\ntrain: {train_iters: 5}\n"
    )
    config, out = dry_run(
        capsys,
        *RECIPE,
        "--config",
        str(path),
        "train.train_iters=6",
        "rng.seed=${train.train_iters}",
    )
    assert (config.scheduler.lr_decay_iters, config.rng.seed) == (6, 6)
    assert f"  lr_decay_iters: 6  # file {path}\n" in out
    path.write_text(re.sub(r"lr_decay_iters: .*", "lr_decay_iters: ${train.train_iters}", out))
    config, out = dry_run(capsys, "train", "--config", str(path), "train.train_iters=7")
    assert config.scheduler.lr_decay_iters == 7
    assert f"  lr_decay_iters: 7  # file {path}\n" in out


def test_seq_length_sets_data_and_model(capsys):
    config, out = dry_run(capsys, *RECIPE, "--seq-length", "512")
    assert (config.dataset.seq_length, config.model.seq_length) == (512, 512)
    assert out.count("seq_length: 512  # command line\n") == 2


def test_data_replaces_made_up_samples(capsys):
    config, out = dry_run(capsys, *RECIPE, "--data", "a/text", "b/text", "--world-size", "8")
    assert config.dataset.blend == (["a/text", "b/text"], None)
    assert config.tokenizer.tokenizer_model == "meta-llama/Llama-3.2-1B"
    assert "blend: {_tuple_: [[a/text, b/text], null]}  # command line\n" in out
    assert "  blend_per_split: null  # default\n" in out
    assert "synthetic" not in out


def test_a_dry_run_reads_what_the_run_reads(capsys, tmp_path):
    """Data, functions, tokenizer and weights; the report is printed all the same."""
    records = tmp_path / "data"
    records.mkdir()
    for name, keys in {
        "training": ("prompt", "completion"),
        "validation": ("prompt", "answer"),
    }.items():
        (records / f"{name}.jsonl").write_text(json.dumps(dict.fromkeys(keys, "x")) + "\n")
    given = (
        "--data",
        str(records),
        f"tokenizer.tokenizer_model={TOKENIZER}",
        "dataset.do_test=false",
    )
    weights = f"checkpoint.pretrained_checkpoint={tmp_path / 'none'}"
    _, out = dry_run(capsys, *FINETUNE, *given, weights)
    refused = [line for line in out.splitlines() if "would be refused" in line]
    assert len(refused) == 2
    assert "validation.jsonl:1" in refused[0]
    assert f"{tmp_path / 'none'} does not exist" in refused[1]
    save_llama(tmp_path / "model", vocab_size=512)
    weights = f"checkpoint.pretrained_checkpoint={tmp_path / 'model'}"
    given = (*given, "dataset.do_validation=false", "--dry-run", "--summary")
    _, out, _ = run(capsys, *FINETUNE, *given, weights)
    (refused,) = [line for line in out.splitlines() if "would be refused" in line]
    assert "model.num_layers=16" in refused
    assert f"--hf-model {tmp_path / 'model'}" in refused
    short = ("--hf-model", str(tmp_path / "model"), "--seq-length", "32")
    code, out, _ = run(capsys, *FINETUNE, *given, *short)
    assert "would be refused" not in out
    assert code == int("does NOT fit" in out)
    assert all(line.startswith("#") for line in out.splitlines())


def test_a_dry_run_plans_the_checkpoint_and_the_export(capsys):
    given = ("checkpoint.save=never_written", "checkpoint.pretrained_checkpoint=null")
    _, out = dry_run(capsys, *RECIPE, *given)
    assert "cannot be exported" not in out
    gate = "model.attention_output_gate=true"
    _, out = dry_run(capsys, *RECIPE, *given, gate)
    assert "# note: the checkpoints of this run cannot be exported to Hugging Face: " in out
    _, out = dry_run(capsys, *RECIPE, *given, gate, "checkpoint.also_save_hf_checkpoint=true")
    refusal = next(line for line in out.splitlines() if "the run would be refused: " in line)
    assert "checkpoint.also_save_hf_checkpoint=True" in refusal
    assert "attention_output_gate=True" in refusal


def test_the_vocabulary_of_a_dry_run_is_that_of_the_tokenizer(capsys):
    kind = "tokenizer.tokenizer_type=HuggingFaceTokenizer"
    given = (*RECIPE, "model.vocab_size=null", kind, "tokenizer.vocab_size=null")
    config, _ = dry_run(capsys, *given, f"tokenizer.tokenizer_model={TOKENIZER}")
    vocabulary = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]
    assert config.model.vocab_size >= len(vocabulary)
    _, _, error = run(capsys, *given, "--dry-run", "tokenizer.tokenizer_model=one/else")
    assert "model.vocab_size" in error
    assert "tokenizer.tokenizer_model=one/else is not on this machine" in error


def test_a_dry_run_tries_the_sample_prompts(capsys, tmp_path):
    (tmp_path / "training.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    splits = ("dataset.do_validation=false", "dataset.do_test=false")
    given = (
        "--data",
        str(tmp_path),
        f"tokenizer.tokenizer_model={TOKENIZER}",
        "--seq-length",
        "32",
        *splits,
    )
    _, out = dry_run(capsys, *FINETUNE, *given, 'logger.sample_prompts=["a b c"]')
    (refused,) = [line for line in out.splitlines() if "would be refused" in line]
    assert "model.seq_length=32" in refused


def test_the_tokenizer_is_that_of_the_weights(capsys, tmp_path):
    shutil.copytree(TOKENIZER, save_llama(tmp_path / "model"), dirs_exist_ok=True)
    given = ("--data", str(tmp_path), f"checkpoint.pretrained_checkpoint={tmp_path / 'model'}")
    config, out = dry_run(capsys, *FINETUNE, *given)
    assert config.tokenizer.tokenizer_model == str(tmp_path / "model")
    assert f"  tokenizer_model: {tmp_path / 'model'}  # checkpoint.pretrained_checkpoint\n" in out
    config, _ = dry_run(capsys, *FINETUNE, *given, "tokenizer.tokenizer_model=other/one")
    assert config.tokenizer.tokenizer_model == "other/one"


def test_a_dry_run_names_what_is_not_on_this_machine(capsys, tmp_path):
    with hub_cache.only(tmp_path):
        given = ("checkpoint.pretrained_checkpoint=someone/model", "--data", "someone/data")
        _, out = dry_run(capsys, *FINETUNE, *given)
    assert "# note: dataset.dataset_name=someone/data is no file or folder here" in out
    assert "# note: checkpoint.pretrained_checkpoint=someone/model is not on this machine" in out


def test_what_does_not_fit_is_told_with_the_nearest_settings_that_do(capsys):
    code, out, _ = run(
        capsys, *RECIPE, "--world-size", "2", "train.micro_batch_size=8", "--dry-run", "--summary"
    )
    (line,) = [
        line for line in out.splitlines() if line.startswith("# the nearest settings that fit: ")
    ]
    assert code == 1
    assert dry_run(capsys, *RECIPE, "--world-size", "2", *line.partition("fit: ")[2].split())


def test_data_of_a_fine_tuning_is_a_folder(capsys):
    recipe = ("train", "--recipe", "llama32_1b_finetune_config")
    config, _ = dry_run(capsys, *recipe, "--data", "folder")
    assert config.dataset.dataset_root == "folder"
    assert "one folder" in run(capsys, *recipe, "--data", "a", "b", "--dry-run")[2]


@pytest.mark.parametrize(("adapter", "lr"), [([], 5e-7), (["--peft-scheme", "lora"], 5e-6)])
def test_any_recipe_of_fine_tuning_can_tune_preferences(capsys, adapter, lr):
    """Its config is the one of the recipe with dpo in its name, at the length of the recipe."""
    words = ["--mode", "dpo", "--data", "pairs", "dpo.beta=0.3", "--seq-length", "512"]
    words.append("checkpoint.pretrained_checkpoint=meta-llama/Llama-3.2-1B")
    recipes = ("llama32_1b_finetune_config", "llama32_1b_dpo_config")
    made, expected = (
        dry_run(capsys, "train", "--recipe", name, *adapter, *words)[0] for name in recipes
    )
    assert made.dpo == expected.dpo
    assert made.dpo.beta == 0.3
    assert made.dataset == expected.dataset
    assert made.optimizer.lr == lr
    assert made.model.calculate_per_token_loss


@pytest.mark.parametrize(("adapter", "lr"), [([], 1e-6), (["--peft-scheme", "lora"], 1e-5)])
def test_any_recipe_of_fine_tuning_can_learn_from_rewards(capsys, adapter, lr):
    """Its config is the one of the recipe with grpo in its name, at the length of the recipe."""
    words = ["--mode", "grpo", "--data", "questions", "grpo.reward_funcs=[builtins:len]"]
    words += ["--seq-length", "1024", "checkpoint.pretrained_checkpoint=meta-llama/Llama-3.2-1B"]
    recipes = ("llama32_1b_finetune_config", "llama32_1b_grpo_config")
    made, expected = (
        dry_run(capsys, "train", "--recipe", name, *adapter, *words)[0] for name in recipes
    )
    assert made.grpo == expected.grpo
    assert made.grpo.reward_funcs == ["builtins:len"]
    assert made.dataset == expected.dataset
    assert made.dataset.max_prompt_length == 512
    assert (made.optimizer.lr, made.validation.eval_iters) == (lr, 0)


def test_rewards_are_not_rehearsed(capsys):
    words = ("train", "--recipe", "qwen3_600m_grpo_config", "--rehearse")
    assert "recipe of fine-tuning" in run(capsys, *words)[2]


def test_reward_functions_of_a_file_need_consent(capsys, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("grpo:\n  reward_funcs: [rewards.py:score]\n")
    words = ["train", "--recipe", "llama32_1b_grpo_config", "--config", str(file), "--dry-run"]
    assert "--trust-config" in run(capsys, *words)[2]
    assert "rewards.py is not a file" in run(capsys, *words, "--trust-config")[1]


def test_list_takes_words(capsys):
    code, out, _ = run(capsys, "train", "--list", "405b")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "recipe",
        *(name for name in catalog() if "405b" in name),
    ]


@pytest.mark.parametrize("stage", ["pretrain", "sft", "distill"])
def test_list_takes_a_stage(capsys, stage):
    _, out, _ = run(capsys, "train", "--list", "smollm2", stage)
    rows = [line.split() for line in out.splitlines()[1:]]
    assert rows
    assert all(row[3] == stage for row in rows)
    assert ([row[0] for row in rows] == ["smollm2_50m_distill_config"]) == (stage == "distill")


def test_list_shows_what_each_recipe_builds(capsys):
    """The table shows recommended values; the configs that the recipes build have them."""
    _, out, _ = run(capsys, "train", "--list")
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert set(rows) == set(catalog())
    for name, cells in rows.items():
        config = find(name)()
        assert cells[-2] == str(config.dataset.seq_length), name
        precision = str(config.mixed_precision).removesuffix("_mixed").removeprefix("bf16_with_")
        assert cells[-1] == precision, name


def test_list_separates_model_and_size():
    assert all(model_and_size(recipe.what)[1] for recipe in catalog().values())
    assert model_and_size(find("qwen15_moe_a2p7b_finetune_config").what) == (
        "Qwen 1.5 MoE",
        "A2.7B",
    )
    assert model_and_size(find("kimi_k2_pretrain_config").what) == ("Kimi K2", "1T-A32B")


def test_list_imports_no_torch():
    code = "import sys; from megatron.bridge.cli.main import main; main(['train', '--list']); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


BAD = [
    (
        ["--recipe", "llama32_1b_pretrain"],
        "there is no recipe llama32_1b_pretrain; did you mean llama32_1b_pretrain_c",
    ),
    (
        ["--recipe", "zzz"],
        "there is no recipe zzz; `megatron-bridge train --list` shows all of them",
    ),
    (
        [],
        "there is nothing to run: give --recipe NAME (`megatron-bridge train --list` shows the names)",
    ),
    (["--list", "zzz"], "no recipe contains 'zzz'; --list alone shows all of them"),
    (
        [*RECIPE[1:], "train.train_itres=5"],
        "there is no train.train_itres in TrainingConfig; did you mean train.train_iters or train.train_samples?",
    ),
    ([*RECIPE[1:], "train.train_iters=many"], "train.train_iters must be an integer, not 'many'"),
    (
        [*RECIPE[1:], "peft.dim=8"],
        "peft.dim needs adapters, which llama32_1b_pretrain_config does not have: add --peft-scheme",
    ),
    ([*RECIPE[1:], "peft=lora"], "peft=lora is an option: write --peft-scheme lora"),
    ([*RECIPE[1:], "optimizer.lr=fast"], "optimizer.lr must be a number or null, not 'fast'"),
    (
        [*RECIPE[1:], "mixed_precision=bf61_mixed"],
        "mixed_precision=bf61_mixed is not a known recipe",
    ),
    (
        [*RECIPE[1:], "model.padded_vocab_size=5"],
        "model.padded_vocab_size is computed from other values",
    ),
    ([*RECIPE[1:], "model.tensor_model_parallel_size=3"], "model.tensor_model_parallel_size=3 "),
    ([*RECIPE[1:], "model.sequence_parallel=true"], "model.sequence_parallel=True needs"),
    (
        [*RECIPE[1:], "model.virtual_pipeline_model_parallel_size=2"],
        "needs model.pipeline_model_parallel_size > 1",
    ),
    (
        [*RECIPE[1:], "model.pipeline_model_parallel_size=16"],
        "needs 16 processes or a multiple, but there are 8",
    ),
    ([*RECIPE[1:], "--world-size", "7"], "train.global_batch_size=512 is not a multiple of"),
    (
        [*RECIPE[1:], "--seq-length", "64", "dataset.seq_length=32"],
        "dataset.seq_length is given twice",
    ),
    (
        [*RECIPE[1:], "dataset.seq_length=9000"],
        "dataset.seq_length=9000 is longer than model.seq_length=8192",
    ),
    (
        [*RECIPE[1:], "model.bf16=false"],
        "model.bf16=False from the command line has no effect: another setting changed it to True",
    ),
    ([*RECIPE[1:], "comm_overlap=1"], "comm_overlap must be a CommOverlapConfig or null, not 1"),
    ([*RECIPE[1:], "--peft-scheme", "lora"], "use a finetune recipe"),
    (
        [*FINETUNE[1:], "--mode", "dora"],
        "peft needs checkpoint.pretrained_checkpoint: give the weights",
    ),
    (
        [*FINETUNE[1:], "--mode", "lora", "--peft-scheme", "dora"],
        "contradict each other: leave one out",
    ),
    (
        [*FINETUNE[1:], "--mode", "lora", "peft={_target_: megatron.bridge.peft.dora.DoRA}"],
        "has peft=DoRA: change its peft",
    ),
    ([*FINETUNE[1:], "--mode", "dora", "peft=null"], "has no peft: change its peft"),
    (
        [*FINETUNE[1:], "--peft-scheme", "lroa"],
        "peft=lroa is not known; did you mean lora",
    ),
    (
        [*RECIPE[1:], "--packed-sequence"],
        "is a MockGPTDatasetConfig: use a finetune recipe, or leave it out",
    ),
    (
        ["--config", "no/such.yaml"],
        "--config no/such.yaml cannot be read: No such file or directory",
    ),
    (["--config", "."], "--config . cannot be read: Is a directory"),
]


def test_overrides_may_stand_behind_data(capsys):
    config, out = dry_run(capsys, *RECIPE, "--data", "a/corpus", "b/corpus", "train.train_iters=7")
    assert config.train.train_iters == 7
    assert config.dataset.blend == (["a/corpus", "b/corpus"], None)
    assert "  train_iters: 7  # command line\n" in out


def test_a_setting_without_a_dot_behind_data_is_a_setting_and_a_folder_of_that_name_is_data(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2024").mkdir()
    config, _ = dry_run(capsys, *RECIPE, "--data", "year=2024", "b/corpus", "mixed_precision=fp32")
    assert config.dataset.blend == (["year=2024", "b/corpus"], None)
    assert config.mixed_precision == "fp32"


def test_packed_rows_are_as_long_as_those_of_the_model(capsys, tmp_path):
    base = ("--data", str(tmp_path), "checkpoint.pretrained_checkpoint=base")
    config, out = dry_run(capsys, *FINETUNE, *base, "--packed-sequence", "--seq-length", "512")
    assert config.dataset.packed_sequence_specs.packed_sequence_size == 512
    assert "  packed_sequence_specs:" in out
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (1, 128)
    _, out = dry_run(capsys, *SMALL_MODEL, *base, "--packed-sequence")
    assert "train.micro_batch_size=16 -> 1" in out


def test_a_model_of_ones_own_takes_the_place_of_the_recipes(capsys, tmp_path):
    save_llama(tmp_path, max_position_embeddings=4096)
    config, out = dry_run(
        capsys, *FINETUNE, "--hf-model", str(tmp_path), "--data", "d", "model.num_layers=3"
    )
    assert (config.model.hidden_size, config.model.num_layers) == (32, 3)
    assert f"  pretrained_checkpoint: {tmp_path}  # command line\n" in out
    code, _, err = run(capsys, *FINETUNE, "--hf-model", str(tmp_path / "none"), "--dry-run")
    assert (code, err) == (
        1,
        f"error: {tmp_path}/none does not exist: give the directory of a model, or a hub id\n",
    )


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_mistake_is_one_line_and_1(capsys, arguments, message):
    code, out, err = run(capsys, "train", *arguments, "--dry-run")
    assert code == 1
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")


def test_mistakes_are_reported_together(capsys):
    code, _, err = run(capsys, *RECIPE, "--dry-run", "train.train_itres=5", "optimizer.lr=fast")
    assert (code, len(err.splitlines())) == (1, 2)
    bad_layout = (
        "model.tensor_model_parallel_size=2",
        "model.num_layers=15",
        "model.pipeline_model_parallel_size=2",
    )
    code, _, err = run(capsys, *RECIPE, "--dry-run", *bad_layout, "model.hidden_dropout=1.5")
    assert (code, len(err.splitlines())) == (1, 2)


BAD_FILES = [
    ("train: {train_iters: [", [], "is not valid YAML at line 2, column 1"),
    (
        "train:\n  train_iters: 1\ntrain:\n  seed: 2",
        RECIPE[1:],
        "line 3, column 1: the key 'train' is given twice",
    ),
    (
        "train: {train_itres: 5}",
        RECIPE[1:],
        "there is no train.train_itres in TrainingConfig; did you mean train.train_iters or train.train_samples?",
    ),
    ("train: {train_iters: x}", RECIPE[1:], "train.train_iters must be an integer, not 'x'"),
    ("train: {train_iters: 5}", [], "is not a complete config: give --recipe NAME"),
    ("just words", RECIPE[1:], "holds no settings"),
    ("", RECIPE[1:], "holds no settings"),
    (
        "_target_: megatron.bridge.training.config.TrainingConfig",
        [],
        "describes a TrainingConfig, not a run",
    ),
    ("_target_: os.system", [], "os.system is not a public name"),
    (
        "_target_: megatron.bridge.training.config.ConfigContainer",
        RECIPE[1:],
        "--recipe cannot be used with",
    ),
]


@pytest.mark.parametrize(("text", "arguments", "message"), BAD_FILES)
def test_wrong_file_is_one_line_and_1(capsys, tmp_path, text, arguments, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    code, out, err = run(capsys, "train", *arguments, "--config", str(path), "--dry-run")
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_wrong_values_in_a_whole_config_are_named(capsys, tmp_path):
    _, out = dry_run(capsys, *RECIPE)
    path = tmp_path / "run.yaml"
    path.write_text(
        out.replace("train_iters: 250000", "train_iters: many").replace(
            "num_layers: 16", "num_layrs: 16"
        )
    )
    code, _, err = run(capsys, "train", "--config", str(path), "--dry-run")
    assert code == 1
    assert "model.num_layrs is not a field of GPTModelProvider; did you mean num_layers" in err
    path.write_text(out.replace("train_iters: 250000", "train_iters: many"))
    code, _, err = run(capsys, "train", "--config", str(path), "--dry-run")
    assert (code, err) == (1, "error: train.train_iters must be an integer, not 'many'\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vlm_stepp", "--step-func vlm_stepp does not exist: use gpt_step"),
        (
            "no_such_module.step",
            "--step-func no_such_module.step: there is no module named 'no_such_module'",
        ),
        ("math.pi", "--step-func math.pi is not a function"),
    ],
)
def test_wrong_step_function_is_named(capsys, name, message):
    code, _, err = run(capsys, *RECIPE, "--step-func", name)
    assert code == 1
    assert message in err


def test_world_size_is_for_dry_runs(capsys):
    assert (
        "--world-size is for --dry-run and --rehearse"
        in run(capsys, *RECIPE, "--world-size", "2")[2]
    )


TOY = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "seq_length": 16,
}
SHAPES = [
    {},
    {
        "share_embeddings_and_output_weights": False,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
    },
    {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
    },
    {"add_bias_linear": False, "add_qkv_bias": True, "position_embedding_type": "learned_absolute"},
    {"attention_bias": False},
    {"mlp_bias": False, "qk_layernorm": True},
    {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "add_bias_linear": False,
        "gated_linear_unit": True,
    },
    {"num_moe_experts": 2, "moe_layer_freq": [0, 1, 1], "add_bias_linear": False},
    {
        "num_moe_experts": 2,
        "moe_layer_freq": 2,
        "moe_shared_expert_intermediate_size": 20,
        "add_bias_linear": False,
    },
]


@pytest.fixture(scope="module")
def model_parallel():
    """One process with Megatron's groups."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    GPTModelProvider(num_layers=1, hidden_size=8, num_attention_heads=1).initialize_model_parallel(
        seed=0
    )
    yield
    leave()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "plain")
def test_parameter_count_is_that_of_the_built_model(model_parallel, shape):
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provider = GPTModelProvider(**{**TOY, **shape})
    built = sum(parameter.numel() for parameter in provider.provide().parameters())
    assert parameter_count(provider) == built


def test_a_vision_model_is_trained_by_its_own_step(capsys):
    code, text, _ = run(capsys, "train", "--recipe", "qwen25_vl_3b_finetune_config", "--dry-run")
    assert code == 0
    assert "tokens of images at once" in text
    code, _, errors = run(capsys, *RECIPE, "--step-func", "vlm_step", "--dry-run")
    assert code == 1
    assert "--step-func vlm_step" in errors


def test_the_tower_of_a_model_that_hears_is_priced_in_seconds(capsys):
    shown = [
        run(capsys, "train", "--recipe", "qwen2_audio_7b_finetune_config", "--dry-run", *more)[1]
        for more in (
            (),
            ("dataset.max_image_tokens=1500",),
            ("model.tensor_model_parallel_size=8",),
        )
    ]
    assert "2,048 tokens of audio (82 seconds, 25 tokens per second)" in shown[0]
    assert "4,096 tokens of audio in each row" in shown[0]
    assert "stretches of 30 seconds" in shown[0]
    assert "750 tokens of audio (30 seconds" in shown[1]
    assert "750 tokens of audio (30 seconds" in shown[2]  # a rank encodes whole stretches


SIZES = {
    "follows": (
        ["model.hidden_size=256", "model.num_attention_heads=8"],
        {"kv_channels": 32, "num_query_groups": 8, "ffn_hidden_size": 8192},
        ["model.kv_channels=32", "model.hidden_size", "model.ffn_hidden_size=8192"],
    ),
    "set": (
        ["model.hidden_size=256", "model.num_attention_heads=8", "model.kv_channels=64"],
        {"kv_channels": 64},
        ["model.num_query_groups=8"],
    ),
    "the same": (["model.hidden_size=2048"], {"kv_channels": 64}, []),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_follow_those_that_they_are_derived_from(capsys, case):
    changes, expected, words = SIZES[case]
    config, out = dry_run(capsys, *RECIPE, *changes)
    assert {name: getattr(config.model, name) for name in expected} == expected
    notes = [line for line in out.splitlines() if line.startswith("# note: model.")]
    assert bool(notes) == bool(words)
    for word in words:
        assert word in "".join(notes)


def test_sizes_of_a_file_follow_too(capsys, tmp_path):
    """Heads of a model without groups are as many as its groups; a width of its own stays."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("model: {num_attention_heads: 8, hidden_size: 512}\n")
    recipe = ("train", "--recipe", "llama2_7b_pretrain_config", "--config", str(settings))
    config, _ = dry_run(capsys, *recipe, "model.tensor_model_parallel_size=1")
    assert (config.model.num_query_groups, config.model.kv_channels) == (8, 64)
    settings.write_text("model: {num_attention_heads: 8}\n")
    recipe = ("train", "--recipe", "qwen3_600m_pretrain_config", "--config", str(settings))
    config, out = dry_run(capsys, *recipe)
    assert config.model.kv_channels == 128, "Qwen3 has heads of a width of their own"
    assert "stay model.kv_channels=128" in out
