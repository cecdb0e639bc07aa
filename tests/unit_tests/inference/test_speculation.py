# SPDX-License-Identifier: Apache-2.0
"""Drafts change how many steps a text takes, and no bit of it."""

from dataclasses import replace

import pytest
import torch

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.scheduler import ScheduledText
from megatron.bridge.inference.speculation import NgramDrafter, Speculation
from megatron.bridge.utils.errors import UserError
from tests.families import decoding, harness, next_tokens
from tests.families.rows import ROWS

NGRAM = Speculation(num_speculative_tokens=4, prompt_lookup_min=1)


def text_of(tokens):
    return ScheduledText(list(tokens), 2, 100)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 3, 5, 2, 4, 5, 2], [4, 5, 2]),  # the most recent of two
        ([7, 1, 2, 3, 8, 2, 9, 1, 2], [3, 8, 2]),  # a longer match before a more recent one
        ([1, 2, 3], []),
        ([5, 5, 5, 5], [5]),
    ],
)
def test_what_followed_the_last_tokens(tokens, expected):
    settings = Speculation(prompt_lookup_min=1, prompt_lookup_max=3)
    assert NgramDrafter(settings).propose(text_of(tokens), 3) == expected
    growing = NgramDrafter(settings)
    text = text_of(tokens[:1])
    for token in tokens[1:]:
        growing.propose(text, 3)
        text.tokens.append(token)
    assert growing.propose(text, 3) == expected


def test_short_matches_are_not_looked_up():
    drafter = NgramDrafter(Speculation(prompt_lookup_min=2))
    assert drafter.propose(text_of([1, 2, 9, 2]), 3) == []


def requests(vocabulary):
    repeated = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    return [
        (repeated, Sampling(max_new_tokens=24, logprobs=2)),
        (repeated[:13], Sampling(max_new_tokens=20, temperature=0.4, seed=3, n=2, logprobs=0)),
        (
            repeated[3:],
            Sampling(max_new_tokens=22, temperature=1.0, top_p=0.6, seed=1, repetition_penalty=1.1),
        ),
        (repeated[:9], Sampling(max_new_tokens=12, stop_ids=[7, 8], min_new_tokens=5)),
        ([vocabulary - 1], Sampling(max_new_tokens=17, presence_penalty=-2.0, prompt_logprobs=0)),
    ]


def completions(model, config, vocabulary):
    with Engine(model, config) as engine:
        jobs = []
        for prompt, sampling in requests(vocabulary):
            jobs += engine.submit(prompt, sampling)
            engine.step()
        list(engine.run())
        steps = engine.drafted_tokens, engine.accepted_tokens
        assert not any(lane.running or lane.waiting for lane in engine.lanes)
    return [job.completion for job in jobs], steps


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("llama_tied", False),
        ("llama_tied", True),
        ("gemma2", True),
        ("gpt_oss", True),
        ("qwen3_moe", False),
        ("deepseek_v3", True),
        ("gpt2", True),
    ],
)
def test_texts_are_those_without_drafts(family_case, name, bf16):
    case = family_case(name)
    model = decoding.decoder(case, "one", bf16=bf16)
    vocabulary = case.row.config["vocab_size"]
    config = decoding.engine_config(
        case, pack=True, chunk=8, rows=16, max_requests=4, graphs=True, max_context=64
    )
    expected, _ = completions(model, config, vocabulary)
    found, (drafted, accepted) = completions(model, replace(config, speculation=NGRAM), vocabulary)
    assert found == expected
    assert drafted > accepted > 0


def test_with_little_memory(family_case):
    """Texts that lose their memory and are computed again."""
    case = family_case("llama_tied")
    model = decoding.decoder(case, "one")
    config = decoding.engine_config(case, pack=True, chunk=8, rows=16, max_requests=4)
    expected, _ = completions(model, config, 101)
    per_token = 1024
    while True:
        config = replace(config, kv_memory=per_token * 96, speculation=NGRAM)
        with Engine(model, config) as engine:
            if engine.lanes[0].arena.size >= 64:
                break
        per_token *= 2
    found, (_, accepted) = completions(model, config, 101)
    assert found == expected
    assert accepted > 0


def test_experts_of_accepted_drafts_are_returned(family_case):
    case = family_case("qwen3_moe")
    model = decoding.decoder(case, "one")
    sampling = Sampling(max_new_tokens=20, routed_experts=True)
    experts = []
    for speculation in (None, NGRAM):
        config = decoding.engine_config(case, speculation=speculation)
        with Engine(model, config) as engine:
            (job,) = engine.submit([3, 1, 4] * 6, sampling)
            list(engine.run())
            assert (engine.accepted_tokens > 0) == bool(speculation)
        experts.append(job.completion.routed_experts)
    assert experts[0].shape == (37, 3, 3)
    assert (experts[0] == experts[1]).all()


class FixedDrafter:
    """Proposes the same tokens always."""

    def __init__(self, tokens):
        self._tokens = tokens

    def propose(self, text, most):
        return self._tokens[:most]

    def forget(self, text):
        pass


def test_wrong_drafts_do_not_change_the_distribution(family_case):
    """Of many seeds, each has its own token, whatever is proposed; so probabilities are exact."""
    case = family_case("llama_tied")
    model = decoding.decoder(case, "one")
    texts = []
    for drafts in (None, [5, 5, 5], [60, 61], [7]):
        config = decoding.engine_config(case, speculation=drafts and NGRAM)
        with Engine(model, config) as engine:
            if drafts:
                engine._drafter = FixedDrafter(drafts)
            jobs = engine.submit(
                [1, 2, 3], Sampling(max_new_tokens=6, temperature=2.0, seed=1, n=64)
            )
            list(engine.run())
            assert engine.drafted_tokens >= 64 * (drafts is not None)
        texts.append([job.completion.tokens for job in jobs])
    assert all(found == texts[0] for found in texts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "medusa"}, "method='medusa' must be one of ngram"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be a number from 1 to 32"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5 must be a number from 1 to 4"),
        ({"speculative_tokens": 3}, "no setting speculative_tokens"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Speculation.of(settings)


@pytest.mark.parametrize(("name", "rings"), [("lfm2", False), ("gemma2", True)])
def test_states_that_cannot_be_undone_are_refused(family_case, name, rings):
    case = family_case(name)
    config = decoding.engine_config(case, speculation=NGRAM, window_rings=rings)
    with pytest.raises(UserError, match="leave out speculative"):
        Engine(decoding.decoder(case, "one"), config)


def model_with_mtp(case, layout="one", bf16=False):
    provider = harness.AutoBridge.from_hf_pretrained(case.checkpoint).to_megatron_provider()
    settings = {**harness.LAYOUTS[layout], "sequence_parallel": False}
    for name, value in harness.settings(provider, settings, case.row.provider).items():
        setattr(provider, name, value)
    provider.backend = "torch"
    model = provider.provide_distributed_model(wrap_with_ddp=False, bf16=bf16)
    for chunk in model:
        chunk.eval()
    return model


MTP = Speculation(method="mtp", num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("name", "bf16"), [("mimo", False), ("mimo", True), ("glm4_moe_next_tokens", True)]
)
def test_texts_are_those_without_drafts_of_mtp_layers(family_case, name, bf16):
    case = family_case(name)
    model = model_with_mtp(case, bf16=bf16)
    vocabulary = case.row.config["vocab_size"]
    config = decoding.engine_config(
        case, pack=True, chunk=8, rows=16, max_requests=4, graphs=True, max_context=64
    )
    expected, _ = completions(model, config, vocabulary)
    found, (drafted, accepted) = completions(model, replace(config, speculation=MTP), vocabulary)
    assert found == expected
    assert drafted > 0
    assert accepted <= drafted


def test_drafts_are_those_of_transformers_layer(tmp_path, monkeypatch):
    """The first draft of each step is what transformers' MTP layer predicts from the complete text."""
    monkeypatch.setitem(ROWS, next_tokens.ROW.name, next_tokens.ROW)
    case = next_tokens.make_reference(tmp_path)
    hf, mtp = next_tokens.load(case.checkpoint)
    with Engine(
        model_with_mtp(case), decoding.engine_config(case, chunk=8, rows=16, speculation=MTP)
    ) as engine:
        jobs = []
        for length in (5, 21, 13):
            prompt = list(range(3, 3 + length))
            jobs += engine.submit(prompt, Sampling(max_new_tokens=7))
        compared = 0
        while not engine.is_idle:
            engine.step()
            for text in (job.text for job in jobs if job.text.drafts):
                ids = torch.tensor([[*text.tokens, 0]])
                with torch.no_grad():
                    output = hf(ids, use_cache=False, output_hidden_states=True)
                    of_depths = next_tokens.next_logits(mtp, output.hidden_states[-1], ids)
                logits = of_depths[0][0, len(text.tokens) - 2]
                assert text.drafts[0] == logits.argmax()
                compared += 1
    assert compared >= 12


@pytest.mark.parametrize(
    ("name", "changes"), [("llama_tied", {}), ("mimo", {"sequence_parallel": True})]
)
def test_models_without_usable_mtp_layers_are_refused(family_case, name, changes):
    case = family_case(name)
    model = model_with_mtp(case)
    for field_name, value in changes.items():
        setattr(model[0].config, field_name, value)
    with pytest.raises(UserError, match=r"method='mtp'.*use ngram"):
        Engine(model, decoding.engine_config(case, speculation=MTP))
