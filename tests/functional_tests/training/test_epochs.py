# SPDX-License-Identifier: Apache-2.0
"""``train.num_epochs``: the rows of the data become steps."""

import json
from collections import Counter

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, SchedulerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import count_rows, resolve_run
from tests.refusals import refused, says
from tests.toy_run import SEQUENCE, toy_config

RECORDS = 10


@pytest.fixture
def folder(tmp_path):
    """Records that begin with their number."""
    for stem in ("training", "validation"):
        lines = [
            json.dumps({"prompt": f"{number} 50", "completion": " 60 61"})
            for number in range(RECORDS)
        ]
        (tmp_path / f"{stem}.jsonl").write_text("\n".join(lines))
    return tmp_path


def config_of(folder, epochs, train=None, packed=False, **blocks):
    specs = PackedSequenceSpecs(packed_sequence_size=SEQUENCE if packed else -1)
    data = FinetuningDatasetConfig(
        dataset_root=str(folder), seq_length=SEQUENCE, do_test=False, packed_sequence_specs=specs
    )
    length = {"num_epochs": epochs, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 0}
    return toy_config(**{"train": length | (train or {}), "dataset": data} | blocks)


def run(config):
    """Train, and return the run and how often each record was in a batch."""
    seen = Counter()

    def step(data_iterator, model):
        batch = next(data_iterator)
        if model.training:
            seen.update(batch["tokens"][:, 0].tolist())
        return forward_step(iter([batch]), model)

    return pretrain(config, step), seen


def test_two_epochs_see_each_record_twice_also_after_a_resume(folder, tmp_path, run_in_process):
    save = tmp_path / "run"
    config = config_of(folder, 2, {"exit_interval": 2}, checkpoint=CheckpointConfig(save=str(save)))
    first, before = run(config)
    assert (first.progress.step, first.config.train.train_iters) == (2, 5)
    config.train.exit_interval = None
    last, after = run(config)
    assert (last.progress.step, last.config.train.train_iters) == (5, 5)
    assert before + after == dict.fromkeys(range(RECORDS), 2)

    config = ConfigContainer.from_yaml((save / "run_config.yaml").read_text())
    assert (config.train.num_epochs, config.train.train_iters) == (2.0, 5)
    assert [note for note in resolve_run(config).notes if "is overridden" in note] == []


@pytest.mark.parametrize(
    ("epochs", "packed", "steps"),
    [
        (1, False, 3),
        (1.5, False, 4),
        (1.2, False, 3),
        (0.1, False, 1),
        (8, True, 4),
    ],  # two packed rows
)
def test_epochs_become_steps(folder, epochs, packed, steps):
    config = config_of(
        folder,
        epochs,
        {"train_iters": 7},
        packed,
        scheduler=SchedulerConfig(lr_warmup_fraction=0.5),
    )
    resolved = resolve_run(config)
    train, rows = resolved.config.train, 2 if packed else RECORDS
    assert (train.train_iters, resolved.config.scheduler.lr_decay_iters) == (steps, steps)
    assert resolved.origins.get("train.train_iters") == "derived"
    [note] = [note for note in resolved.notes if "num_epochs" in note]
    told = f"train.num_epochs={epochs:g} = {steps} steps of 4 samples, {rows} in each epoch"
    assert says(note, told, "train.train_iters=7 is overridden")
    assert config.train.train_iters == 7


def test_without_reading_the_data_the_steps_stay_and_it_is_told(folder):
    resolved = config_of(folder, 3, {"train_iters": 7}).resolve(1)
    assert resolved.config.train.train_iters == 7
    assert [
        note
        for note in resolved.notes
        if "train.num_epochs=3" in note and "train.train_iters=7" in note
    ]


def test_what_has_no_epochs_is_refused(folder):
    for train in ({"train_samples": 8}, {"rampup_batch_size": [2, 2, 8]}):
        [(key, value)] = train.items()
        with refused("train.num_epochs=2", f"train.{key}={value}", "train.train_iters"):
            config_of(folder, 2, train).validate(1)
    with refused("train.num_epochs=2", "MockGPTDatasetConfig", "train.train_iters"):
        toy_config(train={"num_epochs": 2}).validate(1)
    with refused("train.num_epochs=-1", "above 0"):
        config_of(folder, -1).validate(1)


def test_the_command_line(folder, capsys):
    words = [
        "train",
        "--recipe",
        "llama32_1b_finetune_config",
        "--data",
        str(folder),
        "--dry-run",
        "--summary",
    ]
    words += ["tokenizer={tokenizer_type: NullTokenizer, vocab_size: 96}", "model.vocab_size=96"]
    words += [
        "tokenizer.tokenizer_model=null",
        "model.num_layers=2",
        "checkpoint.pretrained_checkpoint=null",
        "train.global_batch_size=4",
    ]
    main([*words, "train.num_epochs=3"])
    assert "train.num_epochs=3 = 8 steps of 4 samples, 10 in each epoch" in capsys.readouterr().out
    assert main([*words, "train.num_epochs=3", "train.train_iters=5"]) == 1
    error = capsys.readouterr().err
    assert "train.num_epochs=3 and train.train_iters=5" in error
    assert "train.num_epochs=null" in error


def test_rows_are_tokenized_once(folder):
    config = config_of(folder, 1)
    assert count_rows(config) == RECORDS
    prepared = config.dataset.counted
    assert prepare_split(config.dataset, "train", None) is prepared
    assert config.dataset.counted is None
