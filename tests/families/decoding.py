# SPDX-License-Identifier: Apache-2.0
"""Greedy texts and log-probabilities of transformers, and what the engine makes of the same prompts."""

import functools
from dataclasses import dataclass

import torch

from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.inference.requests import Sampling
from tests.families import harness
from tests.families.harness import Case

NEW = 32
TIE = 1e-4
"""Two tokens whose logits are this close are a tie, which rounding may break either way."""
LOGPROBS = 1e-4
LENGTHS = (5, 17, 29, 11)
UNCACHED = (
    "nemotron_h",
    "mamba2_tied",
    "bamba_bounded_steps",
    "falcon_h1_bounded_steps",
    "deepseek_v32_pattern",
)
"""Rows whose reference decodes without a cache: with one, transformers 5 leaves out Mamba's smallest step, and keeps
keys of DeepSeek-V3.2 that were rotated before LongRoPE's frequencies changed."""


@dataclass(frozen=True)
class Reference:
    """What transformers generates after one prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    """Of all tokens of the text but the first."""
    gaps: list[float]
    """Difference of the two best logits before each generated token."""


def prompts(vocabulary):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@functools.cache
@torch.no_grad()
def references(case: Case) -> list[Reference]:
    path = case.checkpoint if case.values is None else case.directory / "plain"
    kind = harness.model_class(case.row.model)
    model = kind.from_pretrained(
        path, dtype=torch.float32, attn_implementation=case.row.attention
    ).eval()
    cached = not case.name.startswith(UNCACHED)
    return [_reference(model, prompt, cached) for prompt in prompts(case.row.config["vocab_size"])]


def _reference(model, prompt, cached):
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=cached,
        return_dict_in_generate=True,
        output_logits=True,
    )
    text = out.sequences
    logits = torch.cat(out.logits)
    best = logits.topk(2).values
    whole = model(input_ids=ids, use_cache=False).logits[0, :-1]
    chosen = torch.cat((whole, logits)).log_softmax(-1).gather(-1, text[0, 1:, None])[:, 0]
    return Reference(
        prompt, text[0, len(prompt) :].tolist(), chosen, (best[:, 0] - best[:, 1]).tolist()
    )


def engine_config(case: Case, **changes) -> EngineConfig:
    settings = {
        "max_context": 128,
        "vocabulary": case.row.config["vocab_size"],
        "kv_memory": 1 << 24,
    }
    return EngineConfig(**{**settings, **changes})


def differences(case: Case, layout: str, expected: list[Reference], **changes) -> list[str]:
    """Runs on every rank: what the engine generates otherwise than transformers."""
    return differences_of(decoder(case, layout), case, expected, **changes)


def differences_of(model, case: Case, expected: list[Reference], **changes) -> list[str]:
    sampling = Sampling(max_new_tokens=NEW, logprobs=0, prompt_logprobs=0)
    with Engine(model, engine_config(case, **changes)) as engine:
        jobs = [engine.submit(one.prompt, sampling)[0] for one in expected]
        list(engine.run())
    pairs = zip(jobs, expected, strict=True)
    return [line for job, one in pairs for line in _compare(job.completion, one)]


def decoder(case: Case, layout: str, bf16: bool = False):
    bridge = harness.AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    if getattr(provider, "mtp_num_layers", None):
        provider.mtp_num_layers = None
    for name, value in harness.settings(
        provider, harness.LAYOUTS[layout], case.row.provider
    ).items():
        setattr(provider, name, value)
    provider.backend = "torch"
    model = provider.provide_distributed_model(wrap_with_ddp=False, bf16=bf16)
    for chunk in model:
        chunk.eval()
    return model


def _compare(found, expected):
    same = next(
        (
            index
            for index, pair in enumerate(zip(found.tokens, expected.tokens, strict=True))
            if len(set(pair)) > 1
        ),
        NEW,
    )
    where = f"prompt of {len(expected.prompt)} tokens"
    if same < NEW and expected.gaps[same] > TIE:
        return [f"{where}: token {same} of {NEW} differs (gap {expected.gaps[same]:.1e})"]
    logprobs = [one.logprob for one in (*found.prompt_logprobs, *found.logprobs)]
    count = len(expected.prompt) - 1 + same
    error = (torch.tensor(logprobs[:count]) - expected.logprobs[:count]).abs().max().item()
    return [] if error <= LOGPROBS else [f"{where}: log-probabilities differ by {error:.1e}"]
