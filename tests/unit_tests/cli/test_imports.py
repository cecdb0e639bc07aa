# SPDX-License-Identifier: Apache-2.0
"""A mistake is named within seconds because nothing is imported that a recipe and its check do not need."""

import json
import subprocess
import sys

import pytest

HEAVY = [
    *("transformers", "tokenizers", "huggingface_hub", "accelerate", "datasets", "pyarrow", "pandas", "scipy"),
    *("networkx", "sklearn", "matplotlib", "tensorstore", "wandb", "mlflow", "nvidia_resiliency_ext", "peft"),
    *("torch._dynamo", "torch._inductor", "torch.onnx"),
]
"""Each takes a tenth of a second, or several seconds, of CPU."""

MISTAKES = {
    "a key": ["--recipe", "llama32_1b_pretrain_config", "--dry-run", "train.train_itres=5"],
    "a layout": ["--recipe", "deepseek_v3_pretrain_config", "--dry-run", "model.pipeline_model_parallel_size=7"],
    "adapters": ["--recipe", "gemma3_1b_finetune_config", "--mode", "lora", "--dry-run", "peft.dim=0"],
}


def imported(code):
    """Names of the modules that a fresh process has after ``code``."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_naming_a_mistake_imports_nothing_heavy(mistake):
    arguments = ["train", *MISTAKES[mistake]]
    modules = imported(f"from megatron.bridge.cli.main import main\nassert main({arguments!r}) == 1")
    assert "megatron.bridge.training.config" in modules
    assert [name for name in HEAVY if name in modules] == []
