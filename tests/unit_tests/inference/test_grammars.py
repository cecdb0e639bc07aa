# SPDX-License-Identifier: Apache-2.0
"""Completions that follow schemas and grammars, by a random model at temperature 1."""

import json
import random
import re
import sys
from importlib.util import find_spec

import pytest

from megatron.bridge.inference.grammars import (
    GrammarMatcher,
    Grammars,
    added_ids_by_text,
    after_reasoning,
    choice_grammar,
    json_grammar,
    regex_grammar,
    written_grammar,
)
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests.scripted_server import HAS_SERVER
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    not HAS_SERVER or find_spec("llguidance") is None, reason="run scripts/extra.sh serve"
)
PROMPTS = ["To be, or", "The quality of mercy", "All"]


@pytest.fixture
def llm(model_dir):  # noqa: F811
    with LLM(str(model_dir), dtype="float32", kv_memory=1 << 24) as made:
        yield made


def sample(llm, grammars, count=100, **options):
    """A completion under each grammar, all in one batch; None stands for one without a grammar."""
    options = {"temperature": 1.0, "max_new_tokens": count, **options}
    samplings = [
        Sampling(grammar=grammar, seed=seed, **options) for seed, grammar in enumerate(grammars)
    ]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(grammars))]
    return [choices[0] for choices in llm.generate(prompts, samplings)]


def random_schema(rng, depth=0):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds if depth > 1 else [*kinds, "object", "object", "array", "anyOf"])
    if kind == "object":
        names = rng.sample(["a", "b b", "ä", '"', "n"], rng.randint(1, 3))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        required = rng.sample(names, rng.randint(1, len(names)))
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": 1,
            "maxItems": 3,
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": rng.sample(["x", "yes", 3, None, True, "é"], 3)}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, [1]])}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]$"}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 8)}
    if kind == "integer":
        return {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 900)}
    return {"type": kind}


def test_every_answer_under_a_schema_is_valid(llm):
    import fastjsonschema

    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(60)]
    completions = sample(llm, [json_grammar(schema) for schema in schemas])
    over = [it for it in completions if it.finish_reason == "stop"]
    assert len(over) >= 45  # the others have reached the limit of tokens
    for schema, completion in zip(schemas, completions, strict=True):
        if completion.finish_reason == "stop":
            fastjsonschema.compile(schema)(json.loads(completion.text))


def test_other_rows_of_the_batch_stay_as_they_are(llm):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    alone = sample(llm, [None, None], 12)
    mixed = sample(llm, [None, json_grammar(schema)], 12)
    assert mixed[0].tokens == alone[0].tokens
    assert mixed[1].tokens != alone[1].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_completion(model_dir, llm, temperature):  # noqa: F811
    """Drafts that a grammar forbids are refused, and those that it allows are taken."""
    grammars = [regex_grammar(r"(ab){4}(ac){4}"), json_grammar({"type": "boolean"}), None]
    expected = sample(llm, grammars, 30, temperature=temperature, logprobs=1)
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(
        str(model_dir), dtype="float32", kv_memory=1 << 24, speculative=speculative
    ) as drafting:
        assert sample(drafting, grammars, 30, temperature=temperature, logprobs=1) == expected
        assert 0 < drafting.engine.accepted_tokens < drafting.engine.drafted_tokens
    assert re.fullmatch(r"(ab){4}(ac){4}", expected[0].text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_patterns_choices_and_grammars(llm, temperature):
    gbnf = 'root ::= "[" digit ("," digit)? "]"\ndigit ::= [0-9]'
    grammars = {
        regex_grammar(r"a/b\d{3}(x|\n)"): r"a/b\d{3}(x|\n)",
        choice_grammar(['to "be"', "not\n"]): 'to "be"|not\n',
        written_grammar('start: "<" A ">"\nA: /[a-c]{2}/'): "<[a-c]{2}>",
        written_grammar(gbnf): r"\[[0-9](,[0-9])?\]",
    }
    completions = sample(llm, list(grammars), 40, temperature=temperature)
    for completion, pattern in zip(completions, grammars.values(), strict=True):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text), (completion.text, pattern)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_grammar_holds_behind_reasoning(tokenizer_dir, is_special, has_begun):  # noqa: F811
    """Any text may be reasoned; what follows it is restricted."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    marks = [AddedToken(mark, special=is_special) for mark in ("<think>", "</think>")]
    hf.add_tokens(marks, special_tokens=is_special)
    grammar = after_reasoning(
        choice_grammar(["yes", "no"]), "<think>", "</think>", has_begun, added_ids_by_text(hf)
    )
    grammars = Grammars(hf, len(hf), frozenset({hf.eos_token_id}))
    grammars.check(grammar)
    opening = "" if has_begun else "<think>"
    text = f"{opening}maybe\n</think>\n\nyes"
    tokens = [*hf.encode(text, add_special_tokens=False), hf.eos_token_id]
    matcher = GrammarMatcher(grammars, grammar)
    for count, token in enumerate(tokens):
        allowed = matcher.allowed_tokens(tokens[:count])
        assert allowed[token], (count, hf.decode([token]))
        assert allowed[hf.eos_token_id] == (count == len(tokens) - 1)
    behind = hf.encode(f"{opening}x</think>", add_special_tokens=False)
    (wrong,) = hf.encode("m", add_special_tokens=False)
    assert not GrammarMatcher(grammars, grammar).allowed_tokens(behind)[wrong]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (json_grammar({"type": "objekt"}), ["grammar", "objekt"]),
        (regex_grammar("a("), ["grammar", "regex"]),
        ("start: nothing", ["grammar", "nothing"]),
    ],
)
def test_wrong_grammars_are_named(llm, grammar, words):
    with pytest.raises(UserError) as error:
        sample(llm, [grammar])
    assert all(word in str(error.value) for word in words), error.value


def test_a_grammar_ends_the_text():
    with pytest.raises(UserError, match="ignore_eos"):
        Sampling(grammar='start: "a"', ignore_eos=True)


def test_a_missing_package_is_named(tokenizer_dir, monkeypatch):  # noqa: F811
    from transformers import AutoTokenizer

    monkeypatch.setitem(sys.modules, "llguidance", None)
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    with pytest.raises(UserError, match=r"llguidance.*\[structured\]"):
        Grammars(hf, len(hf), frozenset({hf.eos_token_id})).check('start: "a"')


def too_complex(rules=2100):
    """A grammar that compiles, and whose parser has more alternatives than llguidance allows."""
    alternatives = " | ".join(f"r{number}" for number in range(rules))
    lines = [f'r{number}: "a" r{number} | "a{number}"' for number in range(rules)]
    return "\n".join((f"start: {alternatives}", *lines))


def test_a_grammar_that_is_too_complex_ends_its_text_alone(llm):
    others = ['start: "To" | "be"', None]
    alone = [completion.tokens for completion in sample(llm, others)]
    with pytest.raises(UserError, match="too complex"):
        sample(llm, [too_complex()])
    samplings = [
        Sampling(grammar=grammar, seed=seed, temperature=1.0, max_new_tokens=100)
        for seed, grammar in enumerate([*others, too_complex()])
    ]
    jobs = [
        llm.engine.submit(llm.reader.tokens(prompt, "the prompt"), sampling)[0]
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    assert len(list(llm.engine.run())) == 3
    assert [job.completion.tokens for job in jobs[:2]] == alone
    assert jobs[2].completion.finish_reason == "grammar"


def test_a_tokenizer_without_a_decoder_is_named():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<eos>": 0, "a": 1}, "<eos>")
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<eos>")
    with pytest.raises(UserError, match=r"decoder.*remove the grammar"):
        Grammars(hf, len(hf), frozenset({0})).check('start: "a"')
