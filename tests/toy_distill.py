# SPDX-License-Identifier: Apache-2.0
"""A toy student and a random teacher of transformers' own making, in any layout."""

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import DistillConfig
from megatron.bridge.training.distill import distill
from tests.toy_run import Record, initialize_by_name, save_llama, toy_config
from tests.workers import forget_model_parallel

TEACHER = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "initializer_range": 0.15,  # so that it has an opinion
}
LEARN = {"ce_weight": 0.4, "kl_weight": 0.7, "temperature": 2.0}
HIDDEN = {**LEARN, "hidden_weight": 0.5, "hidden_layers": {1: 6, 3: 4, 4: 8}}


def save_teacher(directory, **changes):
    """A transformers model that is larger than the toy run's."""
    return save_llama(directory, **TEACHER | changes)


class Losses(Callback):
    """All losses of all steps."""

    def __init__(self):
        self.train, self.valid = [], []

    def on_train_step_end(self, context):
        self.train.append({name: loss.item() for name, loss in context.loss_dict.items()})

    def on_eval_end(self, context):
        self.valid.append({name: loss.item() for name, loss in context.total_loss_dict.items()})


def student_config(teacher, learn=None, **arguments):
    """The toy run with a teacher."""
    return toy_config(
        distill=DistillConfig(
            teacher=teacher and str(teacher), **(LEARN if learn is None else learn)
        ),
        **arguments,
    )


def run_student(teacher, learn=None, own_start=True, **arguments):
    """Distill on this rank: losses by step, and a ``Record``; weights start by their names unless loaded."""
    config = student_config(teacher, learn, **arguments)
    if own_start:
        config.model.register_pre_wrap_hook(initialize_by_name)
    record, losses = Record(), Losses()
    try:
        distill(config, [record, losses])
    finally:
        forget_model_parallel()
    return record, losses
