# SPDX-License-Identifier: Apache-2.0
"""Whatever is exported loads in vLLM, which computes what transformers computes with it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from tests.functional_tests.inference.vllm_answers import MARK
from tests.toy_models import randomise
from tests.unit_tests.project.tree import ROOT

PYTHON = ROOT / ".cache/vllm/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: run scripts/vllm.sh"),
]

PROMPTS = [[5, 9, 17, 33], [64, 3, 99, 12, 7, 8]]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on CPUs has no smaller one
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ONE_FILE, SHARDS = "5GB", "100KB"


def save_source(folder, name, config, shard_size=ONE_FILE, **changes):
    """Save a random model of a transformers class."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **changes})
    model = getattr(transformers, name)(made)
    randomise(model)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def export(source, out, has_new_weights=False, adapter=None, **settings):
    """Export a model with other settings than the source's, or with adapters merged; save these in ``adapter``."""
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider(load_weights=not has_new_weights)
    for name, value in settings.items():
        setattr(provider, name, value)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    if adapter is not None:
        model = LoRA(dim=4)(model)
        for parameter in model[0].parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        bridge.save_hf_adapter(model, adapter)
    bridge.save_hf_pretrained(model, out, show_progress=False, strict=False)
    return out


def answers_of_vllm(folder, kind, adapter=None):
    """What vLLM answers; it refuses unknown tensors, and parameters that no tensor fills."""
    job = {"folder": str(folder), "kind": kind, "prompts": PROMPTS}
    if adapter is not None:
        job["adapter"] = str(adapter)
    path = Path(folder).parent / "job.json"
    path.write_text(json.dumps(job))
    script = Path(__file__).with_name("vllm_answers.py")
    done = subprocess.run(
        [PYTHON, "-P", script, path],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def load(folder):
    """The model of an export in transformers, in float32."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def assert_same_tokens(answers, model):
    """Greedy tokens are transformers', and so are their log-probabilities."""
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([prompt + answer["tokens"]])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert rows.argmax(-1).tolist() == answer["tokens"]
        best = rows.max(-1).values
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), best, atol=1e-4, rtol=0)


LLAMA = ("LlamaForCausalLM", "LlamaConfig")
GENERATING = {
    "one file": ((*LLAMA, ONE_FILE), {}, {}),
    "shards": ((*LLAMA, SHARDS), {}, {}),
    "untied": (
        (*LLAMA, ONE_FILE),
        {"tie_word_embeddings": True},
        {"has_new_weights": True, "share_embeddings_and_output_weights": False},
    ),
    "vocabulary": ((*LLAMA, ONE_FILE), {}, {"has_new_weights": True, "vocab_size": 120}),
    "experts": (("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SHARDS), EXPERTS, {}),
}


@pytest.mark.parametrize("case", GENERATING)
def test_an_export_generates(case, tmp_path):
    (name, config, shard_size), changes, settings = GENERATING[case]
    source = save_source(tmp_path / "hf", name, config, shard_size, **changes)
    out = export(source, tmp_path / "out", **settings)
    assert_same_tokens(answers_of_vllm(out, "generate"), load(out))


def test_an_adapter_generates_and_merged_it_says_the_same(tmp_path):
    source = save_source(tmp_path / "hf", "Qwen3ForCausalLM", "Qwen3Config")
    merged = export(source, tmp_path / "out", adapter=tmp_path / "adapter")
    model = load(merged)
    assert_same_tokens(answers_of_vllm(merged, "generate"), model)
    assert_same_tokens(answers_of_vllm(source, "generate", tmp_path / "adapter"), model)


@torch.no_grad()
def test_a_classifier_classifies(tmp_path):
    source = save_source(tmp_path / "hf", *LLAMA)
    out = export(source, tmp_path / "out", head="sequence_classification", num_labels=3)
    model = load(out)
    for prompt, found in zip(PROMPTS, answers_of_vllm(out, "classify"), strict=True):
        expected = model(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_an_embedding_model_embeds(tmp_path):
    out = export(save_source(tmp_path / "hf", "Qwen3Model", "Qwen3Config"), tmp_path / "out")
    words = WordLevel({f"word{token}": token for token in range(SIZES["vocab_size"])}, "word0")
    tokenizer = Tokenizer(words)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="word0", eos_token="word1"
    ).save_pretrained(out)
    model = load(out)
    for prompt, found in zip(PROMPTS, answers_of_vllm(out, "embed"), strict=True):
        last = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=-1)
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
