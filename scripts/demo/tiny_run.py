# SPDX-License-Identifier: Apache-2.0
"""Settings of the demos' runs from random weights, on a laptop."""

from pathlib import Path


def overrides(
    save: Path, steps: int, batch_size: int, seq_length: int, processes: int
) -> list[str]:
    """Return overrides of a fine-tuning recipe.

    Args:
        save: Folder of the checkpoint.
        steps: Optimizer steps.
        batch_size: Samples of a step, and of a microbatch.
        seq_length: Tokens of a sample.
        processes: Tensor-parallel ranks.
    """
    values = {
        "model.seq_length": seq_length,
        "dataset.seq_length": seq_length,
        "dataset.do_test": "false",
        "train.train_iters": steps,
        "train.global_batch_size": batch_size,
        "train.micro_batch_size": batch_size,
        "optimizer.lr": 2e-3,
        "optimizer.min_lr": 1e-4,
        "validation.eval_iters": 1,
        "validation.eval_interval": steps,
        "mixed_precision": "fp32",  # few CPUs compute in bf16
        "logger.log_interval": 50,
        "checkpoint.save": save,
        "checkpoint.save_optim": "false",
        "model.tensor_model_parallel_size": processes,
    }
    return [f"{key}={value}" for key, value in values.items()]
