# SPDX-License-Identifier: Apache-2.0
"""A pruned model is distilled from the model that it was made from, and what is exported loads in transformers."""

import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    DistillConfig,
    OptimizerConfig,
    ValidationConfig,
)
from megatron.bridge.training.distill import distill
from tests.functional_tests.conftest import leave
from tests.toy_models import randomise
from tests.toy_run import VOCABULARY, save_llama, toy_config
from tests.unit_tests.models.surgery.test_pruning import save


class Losses(Callback):
    def __init__(self):
        self.kl = []

    def on_train_step_end(self, context):
        self.kl.append(context.loss_dict["kl loss"].item())


def test_the_divergence_from_the_teacher_falls(run_in_process, tmp_path):
    teacher = save_llama(tmp_path / "teacher", num_hidden_layers=4, head_dim=8)
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    randomise(model)  # distributions that are far from uniform
    save(model, teacher)
    words = ["prune", "--hf-model", teacher, "--hf-path", tmp_path / "student"]
    words += ["--texts", teacher / "texts.jsonl", "--layers", "3", "--ffn-hidden-size", "48"]
    assert main([*map(str, words)]) == 0
    config = toy_config(
        train={"train_iters": 40},
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(
            pretrained_checkpoint=str(tmp_path / "student"), save=str(tmp_path / "run")
        ),
        distill=DistillConfig(teacher=str(teacher), ce_weight=0.0, kl_weight=1.0),
    )
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "student")
    config.model = bridge.to_megatron_provider(load_weights=False)
    config.model.calculate_per_token_loss = True
    losses = Losses()
    distill(config, callbacks=[losses])
    leave()
    assert sum(losses.kl[-5:]) < 0.8 * sum(losses.kl[:5])
    words = ["export", "--hf-model", tmp_path / "student", "--megatron-path", tmp_path / "run"]
    assert main([*map(str, words), "--hf-path", str(tmp_path / "out")]) == 0
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    assert (exported.config.num_hidden_layers, exported.config.intermediate_size) == (3, 48)
    assert exported.config.vocab_size == VOCABULARY
    leave()
