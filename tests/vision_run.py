# SPDX-License-Identifier: Apache-2.0
"""A fine-tuning run of a toy vision-language model on records with several images, with one and with none."""

import json
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.vlm_step import forward_step
from tests import toy_vision
from tests.toy_run import Record, whole_weights

SEQUENCE = 128
SIZES = [(20, 12), (16, 24), (9, 30), (16, 16)]
IMAGES = [[0], [1, 2], [], [3], [2], [0, 3], [], [1]]  # of each record


def write(name: str, folder: Path, weights: bool = True) -> Path:
    """The toy ``name`` and, in ``data``, its records; returns ``folder``."""
    toy_vision.save(name, folder, weights)
    data = folder / "data"
    data.mkdir()
    files = [
        toy_vision.picture(data, f"{place}.png", *size, place) for place, size in enumerate(SIZES)
    ]
    for stem, records in (("training", IMAGES), ("validation", IMAGES[:4])):
        lines = [
            json.dumps(_record([files[image] for image in images])) + "\n" for images in records
        ]
        (data / f"{stem}.jsonl").write_text("".join(lines))
    return folder


def _record(files: list[str]) -> dict:
    parts = [{"type": "image", "image": file} for file in files]
    question = {"type": "text", "text": f"How many{'?' * len(files)}"}
    answer = {"role": "assistant", "content": f"I see {len(files)}."}
    return {"messages": [{"role": "user", "content": [*parts, question]}, answer]}


def sequence_of(folder: Path) -> int:
    """Tokens of a row: an image of Gemma 4 has up to 70, and Qwen2-Audio's template numbers recordings."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return 2 * SEQUENCE if kind.startswith(("gemma4", "qwen2_audio")) else SEQUENCE


def config(
    folder: Path, model=None, kind="padded", train=None, dataset=None, **blocks
) -> ConfigContainer:
    """The run in ``folder``; ``model``, ``train`` and ``dataset`` set single fields."""
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
    for name, value in {"seq_length": sequence_of(folder), **(model or {})}.items():
        assert hasattr(provider, name), f"a provider has no {name}"
        setattr(provider, name, value)
    packed = kind == "packed"
    specs = (
        PackedSequenceSpecs(packed_sequence_size=sequence_of(folder), pad_seq_to_mult=4)
        if packed
        else None
    )
    sizes = {"micro_batch_size": 1, "global_batch_size": 2} if packed else {}
    return ConfigContainer(
        **{
            "model": provider,
            "train": TrainingConfig(
                **{"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3}
                | sizes
                | (train or {})
            ),
            "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5),
            "scheduler": SchedulerConfig(lr_decay_style="constant"),
            "dataset": FinetuningDatasetConfig(
                **{
                    "dataset_root": str(folder / "data"),
                    "seq_length": sequence_of(folder),
                    "packed_sequence_specs": specs,
                    "padding_free": kind == "padding-free",
                    "do_test": False,
                }
                | (dataset or {})
            ),
            "logger": LoggerConfig(log_interval=1000),
            "tokenizer": TokenizerConfig(tokenizer_model=str(folder)),
            "checkpoint": CheckpointConfig(pretrained_checkpoint=str(folder)),
            "validation": ValidationConfig(eval_interval=3, eval_iters=1),
            "mixed_precision": "fp32",
        }
        | blocks
    )


def first_weights(folder: Path, model: dict) -> dict[str, torch.Tensor]:
    """The weights that a run starts from, by name; what is trained moves by less than it is rounded to."""
    record = run(
        folder,
        model=model,
        train={"train_iters": 1},
        optimizer=OptimizerConfig(lr=1e-30, weight_decay=0.0),
    )
    return whole_weights([record])


def run(folder: Path, step=forward_step, **arguments) -> Record:
    """Train on this rank; what happened."""
    torch.set_num_threads(1)
    record = Record()
    try:
        finetune(config(folder, **arguments), step, [record])
    finally:
        parallel_state.destroy_model_parallel()
    return record
