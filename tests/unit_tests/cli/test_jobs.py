# SPDX-License-Identifier: Apache-2.0
"""Jobs of ``train`` beyond training on data: packed rows, students, and the logits of teachers."""

import copy

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import train_job
from megatron.bridge.cli.support.options import add_recipe_options
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.training.config import DistillConfig
from megatron.bridge.utils.config.overrides import check_sticks
from megatron.bridge.utils.errors import UserError
from tests.toy_distill import save_teacher, student_config
from tests.unit_tests.cli.test_main import run
from tests.workers import forget_model_parallel

PRETRAIN = ("--recipe", "llama32_1b_pretrain_config")
FINETUNE = ("--recipe", "llama32_1b_finetune_config")


def parsed(*arguments):
    parser = Parser()
    add_recipe_options(parser)
    return parser.parse_args(arguments)


def test_packed_rows_stay_as_they_were_asked_for(tmp_path):
    """A run resolves a copy: what is filled in there is no change of what was asked for."""
    base = ("--data", str(tmp_path), "checkpoint.pretrained_checkpoint=base")
    ready = train_job.prepare(parsed(*FINETUNE, *base, "--packed-sequence"))
    resolved = copy.deepcopy(ready.config)
    resolved.validate(1)
    check_sticks(resolved, ready.changes)


def test_any_recipe_can_train_a_student():
    options = ("distill.teacher=big", "distill.temperature=2", "distill.hidden_layers={4: 12}")
    ready = train_job.prepare(
        parsed(*PRETRAIN, "--mode", "distill", *options, "distill.hidden_weight=0.1")
    )
    wanted = DistillConfig(teacher="big", temperature=2.0, hidden_layers={4: 12}, hidden_weight=0.1)
    assert (ready.mode, ready.config.distill) == ("distill", wanted)


def test_a_step_of_ones_own_is_not_ignored():
    with pytest.raises(UserError, match=r"--step-func a.b cannot be used with --mode distill"):
        train_job.prepare(parsed(*PRETRAIN, "--mode", "distill", "--step-func", "a.b"))


def test_a_teacher_is_cached_and_learnt_from(tmp_path, capsys):
    """As one types it, from a whole config."""
    learn = {"top_k": 8, "cache": str(tmp_path / "cache")}
    config = student_config(save_teacher(tmp_path / "teacher"), learn, train={"train_iters": 2})
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml())
    cache = ("train", "--config", str(file), "--mode", "cache-teacher")
    code, out, _ = run(
        capsys, *cache, "--dry-run", "--world-size", "2", "model.tensor_model_parallel_size=2"
    )
    assert (code, ", 8 layers, hidden size" in out, "tensor 2" in out) == (0, True, True)
    assert not (tmp_path / "cache").exists()
    code, out, err = run(
        capsys, *cache, "--dry-run", "--world-size", "3", "model.pipeline_model_parallel_size=3"
    )
    assert (code, out, "num_layers=8" in err) == (1, "", True), err
    code, _, err = run(capsys, *cache)
    assert (code, "16 of 16 samples" in err) == (0, True)
    forget_model_parallel()
    code, _, err = run(
        capsys, "train", "--config", str(file), f"checkpoint.save={tmp_path / 'run'}"
    )
    assert (code, "kl loss" in err) == (0, True), err
    assert paths.iteration_dir(tmp_path / "run", 2).is_dir()


CLASSES = """
model: {head: sequence_classification, num_labels: 2}
dataset: {_target_: ClassificationDatasetConfig, dataset_root: reviews, seq_length: 64}
"""


@pytest.mark.parametrize("chosen", [False, True])
def test_records_of_a_file_are_read_with_the_models_tokenizer(tmp_path, chosen):
    """The recipe alone has mock data, and a tokenizer that reads only numbers."""
    (tmp_path / "classes.yaml").write_text(CLASSES)
    words = [*FINETUNE, "--config", str(tmp_path / "classes.yaml")]
    if chosen:
        words += ["tokenizer.tokenizer_model=other"]
    ready = train_job.prepare(parsed(*words))
    tokenizer = ready.config.tokenizer
    if chosen:
        assert tokenizer.tokenizer_model == "other"
        return
    assert tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    assert tokenizer.tokenizer_model == "meta-llama/Llama-3.2-1B"
    assert ready.origins.get("tokenizer.tokenizer_model") == "from the model of the recipe"
