# SPDX-License-Identifier: Apache-2.0
"""Every family in one process: transformers' greedy tokens and log-probabilities."""

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron.bridge.inference import decoding_state
from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.scheduler import StepPlan
from megatron.bridge.peft.lora import LoRA
from tests.families import decoding
from tests.families.rows import ROWS

WINDOWED = (
    "mistral_window",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "cohere2",
    "llama4",
    "phimoe_long_rope",
)
MIXED = (
    "llama_tied",
    "gemma2",
    "gemma4",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "nemotron_h_experts",
    "lfm2",
)


SOME = ("gpt2", "opt", "cohere2", "hunyuan_moe", "granitemoehybrid")
"""Of the brief rows, those whose decoding has something of its own."""
SAME_STATE = (
    *(
        "llama_biases",
        "llama_attention_bias",
        "llama_mlp_bias",
        "gemma_biases",
        "gemma2_biases",
        "glm_whole_heads",
    ),
    *(
        "nemotron_biases",
        "olmo2_groups",
        "granite_biases",
        "mistral_tied",
        "qwen3_fp8",
        "ministral3_fp8_one_scale",
    ),
    *(
        "qwen3_moe_sequential",
        "qwen3_moe_idle_experts",
        "olmoe_tied",
        "glm4_moe_groups",
        "glm4_moe_next_tokens",
    ),
    *(
        "gpt_oss_tied_no_attention_bias",
        "gpt_oss_mxfp4",
        "deepseek_v3_fp8",
        "moonlight",
        "lfm2_adjusted",
    ),
    *("nemotron_h_biases", "nemotron_h_recomputed", "nemotron_h_expert_groups"),
)
"""They differ from another row of their architecture in weights and routers alone, which a forward pass proves."""
assert set(SAME_STATE) <= set(ROWS)
NAMES = [
    pytest.param(
        name, marks=[pytest.mark.slow] * (name in SAME_STATE or (row.brief and name not in SOME))
    )
    for name, row in ROWS.items()
    # whose frequencies change with every token beyond the trained length, where ``LLM`` refuses a text
    if row.config.get("rope_parameters", {}).get("rope_type") != "dynamic"
]


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_of_transformers(family_case, name):
    case = family_case(name)
    problems = decoding.differences(case, "one", decoding.references(case))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_as_rings(family_case, name, chunk):
    """Chunks shorter and longer than the window; a text is several times as long as its rings."""
    case = family_case(name)
    model = decoding.decoder(case, "one")
    problems = decoding.differences_of(
        model, case, decoding.references(case), chunk=chunk, window_rings=True
    )
    assert not problems, "\n".join(problems)
    whole, rings = (
        sum(it.per_token for it in decoding_state.Kept.of(model, rings)) for rings in (False, True)
    )
    assert rings < whole


@pytest.mark.parametrize("name", MIXED)
def test_packed_weights_give_the_same_texts_and_are_unpacked(family_case, name):
    case = family_case(name)
    expected = decoding.references(case)
    model = decoding.decoder(case, "one")
    before = {name: weight.clone() for name, weight in model[0].named_parameters()}
    problems = decoding.differences_of(model, case, expected, pack=True)
    assert not problems, "\n".join(problems)
    assert all(torch.equal(weight, before[name]) for name, weight in model[0].named_parameters())


@pytest.mark.parametrize("name", MIXED)
def test_chunks_change_no_log_probability(family_case, name):
    """Cached log-probabilities equal those of one full forward pass for every size of chunks.

    The limit is 1e-5 of the deviation of the logits, as all limits on logits are: MKL multiplies rows of a chunk and
    of the whole text in other orders on CPUs with AVX2, where both are 4e-6 to 1.5e-5 off the result in float64.
    """
    case = family_case(name)
    model = decoding.decoder(case, "one")
    (ids,) = case.batch[0][:1].tolist()
    with torch.no_grad():
        position = torch.arange(len(ids))[None]
        logits = model[0](input_ids=torch.tensor([ids]), position_ids=position, attention_mask=None)
    vocabulary = case.row.config["vocab_size"]
    expected = (
        logits[0, :-1, :vocabulary].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    )
    for chunk in (1, 3, 7, 8, 16, 39, 64):
        with Engine(model, decoding.engine_config(case, chunk=chunk, rows=64)) as engine:
            (job,) = engine.submit(ids, Sampling(max_new_tokens=0, prompt_logprobs=0))
            list(engine.run())
        found = torch.tensor([one.logprob for one in job.completion.prompt_logprobs])
        torch.testing.assert_close(found, expected, atol=1e-5 * logits.std().item(), rtol=0)


def test_attention_of_megatron_core_decodes_like_ours(family_case):
    case = family_case("qwen3")
    model = decoding.decoder(case, "one")
    for layer in model[0].decoder.layers:
        attention = layer.self_attention
        attention.core_attention = DotProductAttention(
            attention.config, attention.layer_number, AttnMaskType.causal, "self"
        )
    expected = decoding.references(case)
    with Engine(model, decoding.engine_config(case)) as engine:
        jobs = [
            engine.submit(one.prompt, Sampling(max_new_tokens=decoding.NEW))[0] for one in expected
        ]
        list(engine.run())
    assert [job.completion.tokens for job in jobs] == [one.tokens for one in expected]
    assert isinstance(model[0].decoder.layers[0].self_attention.core_attention, DotProductAttention)


def test_nothing_stays_attached(family_case):
    case = family_case("qwen3_next")
    model = decoding.decoder(case, "one")
    before = {name: dict(vars(module)) for name, module in model[0].named_modules()}
    with pytest.raises(ZeroDivisionError):
        fail_while_decoding(model, decoding.engine_config(case))
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    for name, module in model[0].named_modules():
        now = vars(module)
        assert set(now) == set(before[name]), name
        assert not any(now[hook] for hook in hooks) or "attention" in name or not name, name
    ids = torch.tensor([[1, 2, 3]])
    assert model[0](
        input_ids=ids, position_ids=torch.arange(3)[None], attention_mask=None
    ).requires_grad


def fail_while_decoding(model, config):
    with Engine(model, config) as engine:
        engine.submit([1, 2, 3], Sampling(max_new_tokens=4))
        engine.step()
        raise ZeroDivisionError


def test_keys_are_cached_where_an_adapter_needs_the_latents(family_case):
    case = family_case("deepseek_v3")
    model = decoding.decoder(case, "one")
    LoRA(target_modules=["linear_kv_up_proj"], dim=2)(
        model, training=False
    )  # adds zero until it is trained
    problems = decoding.differences_of(model, case, decoding.references(case), pack=True)
    assert not problems, "\n".join(problems)


def test_a_rank_without_work_writes_to_no_text(family_case):
    """It computes a row for the sake of other ranks' experts, beside the caches of texts that may be used again."""
    case = family_case("mixtral")
    model, prompt = decoding.decoder(case, "one"), list(range(3, 30))
    sampling = Sampling(max_new_tokens=4, logprobs=0)
    with Engine(model, decoding.engine_config(case, chunk=8)) as engine:
        found = []
        for _ in range(2):
            (job,) = engine.submit(prompt, sampling)
            list(engine.run())
            found.append(job.completion.logprobs)
            engine._runner.run(StepPlan(), [], 3)
    assert found[0] == found[1]
