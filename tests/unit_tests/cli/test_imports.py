# SPDX-License-Identifier: Apache-2.0
"""A mistake is named within seconds because nothing is imported that a recipe and its check do not need."""

import json
import subprocess
import sys

HEAVY = [
    *(
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "accelerate",
        "datasets",
        "pyarrow",
        "pandas",
        "scipy",
    ),
    *(
        "networkx",
        "sklearn",
        "matplotlib",
        "rich",
        "sympy",
        "tensorboard",
        "tensorstore",
        "wandb",
        "mlflow",
        "nvidia_resiliency_ext",
        "peft",
    ),
    *("torch._dynamo", "torch._inductor", "torch.onnx"),
]
"""Each takes a tenth of a second, or several seconds, of CPU."""

MISTAKES = {
    "a key": ["--recipe", "llama32_1b_pretrain_config", "--dry-run", "model.num_layesr=5"],
    "a layout": [
        "--recipe",
        "deepseek_v3_pretrain_config",
        "--dry-run",
        "model.pipeline_model_parallel_size=7",
    ],
    "adapters": [
        "--recipe",
        "gemma3_1b_finetune_config",
        "--mode",
        "lora",
        "--dry-run",
        "peft.dim=0",
    ],
}


EACH = f"""
import json, sys
from megatron.bridge.cli.main import main
for name, arguments in {MISTAKES!r}.items():
    assert main(["train", *arguments]) == 1, name
    print(json.dumps([name, sorted(sys.modules)]))
"""


def test_naming_a_mistake_imports_nothing_heavy():
    """In one process: what the first mistake imports, the others may use."""
    done = subprocess.run([sys.executable, "-c", EACH], capture_output=True, text=True, check=True)
    modules = dict(json.loads(line) for line in done.stdout.splitlines())
    assert modules.keys() == MISTAKES.keys()
    assert "megatron.bridge.training.config" in modules["a key"]
    assert {name: [one for one in HEAVY if one in found] for name, found in modules.items()} == {
        name: [] for name in MISTAKES
    }


MISTYPED = [
    ["inspect", "nope"],
    ["checkpoint", "inspect", "nope"],
    ["checkpoint", "diff", "nope", "nope"],
    ["checkpoint", "verify", "nope"],
    ["checkpoint", "convert", "nope", "out"],
    ["convert", "--hf-model", "/nope", "--megatron-path", "out"],
    ["plan", "--hf-model", "/nope"],
    ["verify", "/nope", "nope"],
    ["port", "/nope"],
    ["chat", "/nope"],
    ["generate", "/nope", "--prompt", "hi"],
    ["from-megatron-lm", "nope"],
    ["tune", "--recipe", "llama32_1b_pretrain_confg"],
    ["tune", "--recipe", "llama32_1b_pretrain_config", "--fixed", "tp=3"],
    ["export", "--megatron-path", "nope", "--hf-path", "out"],
    ["adapter", "merge", "--adapter", "nope", "--hf-path", "out"],
    ["train", "--config", "nope.yaml"],
    ["train", "--recipe", "llama32_1b_pretrain_confg"],
    *(
        ["train", "--recipe", "llama32_1b_pretrain_config", *words]
        for words in (
            ["train.train_itres=5"],
            ["train.train_iters=many"],
            ["model.hidden_dropout=2"],
            ["--step-func", "math.setp"],
            ["--hf-model", "/nope"],
        )
    ),
    ["tune", "--recipe", "llama32_1b_pretrain_config", "--gpu", "H1000"],
    ["convert", "--hf-model", "hub/id", "--megatron-path", "out", "--tp", "3"],
]
WITHOUT_TORCH = f"""
import sys
from megatron.bridge.cli.main import main
for arguments in {MISTYPED!r}:
    assert main(arguments) == 1, arguments
    assert "torch" not in sys.modules, arguments
"""


def test_most_mistakes_do_not_even_import_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(MISTYPED)
