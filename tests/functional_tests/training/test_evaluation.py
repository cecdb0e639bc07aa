# SPDX-License-Identifier: Apache-2.0
"""Evaluation alone, on several sets, and in batches of another size."""

import json
from dataclasses import dataclass, field

import pytest
from megatron.core import parallel_state

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import FinetuningDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tests.functional_tests.conftest import leave
from tests.refusals import refused
from tests.toy_run import SEQUENCE, initialize_by_name, toy_config

TWO_STAGES = {"pipeline_model_parallel_size": 2}
TWO_SHARDS = {"tensor_model_parallel_size": 2}


@dataclass
class Evaluations(Callback):
    """The losses of all evaluations by name, and how many steps and microbatches there were."""

    valid: list = field(default_factory=list)
    test: list = field(default_factory=list)
    steps: int = 0

    def on_train_step_end(self, context):
        self.steps += 1

    def on_eval_end(self, context):
        self.valid.append({name: loss.item() for name, loss in context.total_loss_dict.items()})

    def on_test_end(self, context):
        self.test.append({name: loss.item() for name, loss in context.total_loss_dict.items()})


def run(model=None, train=None, checkpoint=None, seed=1234, **validation):
    config = toy_config(
        model=model,
        train={"train_iters": 3} | (train or {}),
        dataset=MockGPTDatasetConfig(seq_length=SEQUENCE, random_seed=seed),
        validation=ValidationConfig(**{"eval_iters": 2} | validation),
        checkpoint=CheckpointConfig(**checkpoint or {}),
    )
    config.model.register_pre_wrap_hook(initialize_by_name)
    record = Evaluations()
    try:
        finished = pretrain(config, forward_step, [record])
        record.parameters_of_optimizer = len(finished.optimizer.get_parameters())
    finally:
        parallel_state.destroy_model_parallel()
    return record


@pytest.fixture
def here(run_in_process):
    """Run in this process, whose group is left afterwards."""

    def call(**arguments):
        record = run(**arguments)
        leave()
        return record

    return call


def files_below(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_evaluation_alone_is_that_after_training_and_writes_nothing(here, tmp_path):
    save = {"save": str(tmp_path)}
    trained = here(checkpoint=save)
    before = files_below(tmp_path)
    for checkpoint in (save, {"load": str(tmp_path)}):
        alone = here(train={"skip_train": True}, checkpoint=checkpoint)
        assert alone.steps == 0
        assert alone.parameters_of_optimizer == 0
        assert (alone.valid, alone.test) == (trained.valid, trained.test)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("model", [TWO_SHARDS, TWO_STAGES, None])
def test_evaluation_alone_in_every_layout(here, two_workers, tmp_path, model):
    trained = here(checkpoint={"save": str(tmp_path)})
    for record in two_workers.run(evaluate_alone, model, str(tmp_path)):
        assert record.steps == 0
        assert record.valid[0]["lm loss"] == pytest.approx(trained.valid[0]["lm loss"], rel=1e-6)
        assert record.test[0]["lm loss"] == pytest.approx(trained.test[0]["lm loss"], rel=1e-6)


def evaluate_alone(model, folder):
    return run(model=model, train={"skip_train": True}, checkpoint={"load": folder})


def test_each_set_has_the_loss_of_a_run_on_its_data(here):
    several = here(sets={"split": None, "other": "77"})
    names = ["split/lm loss", "other/lm loss"]
    assert list(several.valid[0]) == names
    with_same_data = here().valid[0]["lm loss"]
    assert several.valid[0]["split/lm loss"] == with_same_data
    # the run on other data has other weights after its steps, and those of the start before them
    at_start = here(train={"skip_train": True}, sets={"other": "77"})
    alone = here(train={"skip_train": True}, seed=77)
    assert at_start.valid[0]["other/lm loss"] == alone.valid[0]["lm loss"]
    assert at_start.valid[0]["other/lm loss"] != with_same_data


def test_the_metric_of_a_set_decides_about_the_best_step(here, tmp_path):
    sets = {"easy": None, "hard": "77"}
    record = here(
        sets=sets,
        eval_interval=1,
        metric="hard/lm loss",
        metric_mode="max",
        patience=1,
        train={"train_iters": 9},
    )
    losses = [losses["hard/lm loss"] for losses in record.valid]
    ends = next(index for index in range(1, len(losses)) if losses[index] <= max(losses[:index]))
    assert record.steps == ends + 1


def test_another_batch_evaluates_the_same_samples(here, two_workers):
    usual = here()
    smaller = {"eval_micro_batch_size": 1, "eval_global_batch_size": 4, "eval_iters": 4}
    larger = {"eval_micro_batch_size": 8, "eval_global_batch_size": 16, "eval_iters": 1}
    for sizes in (smaller, larger):
        record = here(**sizes)
        assert record.valid[0]["lm loss"] == pytest.approx(usual.valid[0]["lm loss"], rel=1e-6)
    for model in (TWO_STAGES, None):
        for record in two_workers.run(evaluate_in_batches, model, smaller):
            assert record.valid[0]["lm loss"] == pytest.approx(usual.valid[0]["lm loss"], rel=1e-6)


def evaluate_in_batches(model, sizes):
    return run(model=model, **sizes)


def test_what_cannot_be_evaluated_is_named(here):
    with refused("validation.eval_global_batch_size=8", "validation.eval_micro_batch_size=3"):
        here(eval_micro_batch_size=3, eval_global_batch_size=8)
    with refused("train.skip_train=True", "validation.eval_iters"):
        here(train={"skip_train": True}, eval_iters=0)
    with refused("validation.sets", "data/text", "number"):
        here(sets={"other": "data/text"})
    with refused("validation.sets", "a/b"):
        here(sets={"a/b": None})


def test_sets_of_records_from_the_command_line(run_in_process, tmp_path, capsys):
    for name, answer in (("chats", " 60 61"), ("math", " 7 8")):
        folder = tmp_path / name
        folder.mkdir()
        line = json.dumps({"prompt": "5 50", "completion": answer})
        for stem in ("training", "validation", "test"):
            (folder / f"{stem}.jsonl").write_text("\n".join([line] * 8))
    data = FinetuningDatasetConfig(dataset_root=str(tmp_path / "chats"), seq_length=SEQUENCE)
    path = tmp_path / "toy.yaml"
    path.write_text(toy_config(train={"train_iters": 1}, dataset=data).to_yaml())
    sets = f"validation.sets={{chats: null, math: {tmp_path / 'math'}}}"
    command = ["train", "--config", str(path), "--mode", "pretrain"]
    assert main([*command, "train.skip_train=true", sets]) == 0
    output = "".join(capsys.readouterr())
    assert "chats/lm loss" in output
    assert "math/lm loss" in output
    leave()
    (tmp_path / "math" / "validation.jsonl").unlink()
    main([*command, "train.skip_train=true", sets])
    assert "math has no validation data" in "".join(capsys.readouterr())
