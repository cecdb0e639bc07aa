# SPDX-License-Identifier: Apache-2.0
"""Masks of conversations against oracles that never render a prefix: see ``chat_forms``."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.bridge.data.finetuning.rows import PackedRows
from megatron.bridge.data.records.encoding import NO_END, NO_TARGET, TOO_LONG, RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.samples import Samples
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests.refusals import refused
from tests.unit_tests.data.records.chat_forms import CONTROL_TOKENS, FORMS

LONG = 100_000
BY_NAME = {form.name: form for form in FORMS}
PLAIN = [
    {"role": "user", "content": "alpha beta?"},
    {"role": "assistant", "content": "gamma."},
    {"role": "user", "content": "delta"},
    {"role": "assistant", "content": "epsilon, zeta!"},
]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"city": {"type": "string"}}},
}
CALLING = [
    {"role": "user", "content": "Rain in Oslo?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
        ],
    },
    {"role": "tool", "content": "wet"},
    {"role": "assistant", "content": "Yes, it rains."},
]


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer_dir, tmp_path_factory):
    """The small tokenizer with the control tokens of all templates."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS})
    directory = tmp_path_factory.mktemp("chat-tokenizer")
    hf.save_pretrained(directory)
    return HuggingFaceTokenizer(str(directory))


def encoder(tokenizer, form, max_tokens=LONG, **rules):
    return RecordEncoder(
        tokenizer, EncodingRules(max_tokens=max_tokens, chat_template=form.template, **rules)
    )


def encode(tokenizer, form, messages, tools=None, **rules):
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    return encoder(tokenizer, form, **rules)([("here", record)])


def expected(tokenizer, form, messages, tools, wanted):
    """Tokens, and which are learnt: those with a character of a wanted piece, found by decoding one by one."""
    pieces = form.pieces(messages, tools)
    text = "".join(piece for piece, _ in pieces)
    learnt = [owner in wanted for piece, owner in pieces for _ in piece]
    ids = tokenizer.hf.encode(text, add_special_tokens=False)
    trained, place = [], 0
    for token in ids:
        length = len(tokenizer.hf.decode([token], clean_up_tokenization_spaces=False))
        trained.append(any(learnt[place : place + length]))
        place += length
    assert place == len(text), "the oracle needs tokens of whole characters"
    return ids, [place > 0 and flag for place, flag in enumerate(trained)]


def answers(messages):
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def check(tokenizer, form, messages, tools, train_on):
    wanted = answers(messages)[-1:] if train_on == "last" else answers(messages)
    if form.refuses(messages, tools, wanted):
        with refused("here: ", "message ", "dataset.split_turns=true", "dataset.train_on=last"):
            encode(tokenizer, form, messages, tools, train_on=train_on)
        return
    encoded = encode(tokenizer, form, messages, tools, train_on=train_on)
    ids, trained = expected(tokenizer, form, messages, tools, wanted)
    assert encoded.samples.tokens.tolist() == ids
    assert encoded.samples.trained.tolist() == trained
    assert any(trained)
    assert not all(trained)


def test_there_are_thirty_forms():
    assert len(BY_NAME) == len(FORMS) >= 30
    assert sum(form.marked for form in FORMS) >= 3
    assert sum(form.tools for form in FORMS) >= 5


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("name", BY_NAME)
def test_masks_of_two_turns(chat_tokenizer, name, train_on):
    form = BY_NAME[name]
    check(chat_tokenizer, form, PLAIN, None, train_on)
    if form.system:
        check(
            chat_tokenizer,
            form,
            [{"role": "system", "content": "Be brief."}, *PLAIN],
            None,
            train_on,
        )
    if form.tools:
        check(chat_tokenizer, form, CALLING, [WEATHER], train_on)
        check(chat_tokenizer, form, [*PLAIN, *CALLING], [WEATHER], train_on)


@pytest.mark.parametrize("name", BY_NAME)
def test_split_turns_are_what_inference_sees(chat_tokenizer, name):
    """Each answer is a sample, behind its own prompt; only a template that hides the answer is refused."""
    form = BY_NAME[name]
    parts = [PLAIN[:2], PLAIN]
    if any(form.refuses(part, None, answers(part)[-1:]) for part in parts):
        with refused("here: ", "dataset.chat_template"):
            encode(chat_tokenizer, form, PLAIN, split_turns=True)
        return
    encoded = encode(chat_tokenizer, form, PLAIN, split_turns=True)
    for example, part in zip(encoded.samples, parts, strict=True):
        ids, trained = expected(chat_tokenizer, form, part, None, answers(part)[-1:])
        assert (example.tokens.tolist(), example.trained.tolist()) == (ids, trained)


@pytest.mark.parametrize("name", ["chatml marked", "llama3.1 marked", "hermes marked"])
def test_marked_templates_give_transformers_own_masks(chat_tokenizer, name):
    form = BY_NAME[name]
    out = chat_tokenizer.hf.apply_chat_template(
        PLAIN, chat_template=form.template, return_assistant_tokens_mask=True, return_dict=True
    )
    encoded = encode(chat_tokenizer, form, PLAIN)
    assert encoded.samples.tokens.tolist() == out["input_ids"]
    assert encoded.samples.trained.astype(int).tolist() == out["assistant_masks"]


def test_completion_is_all_that_follows_the_last_user(chat_tokenizer):
    form = BY_NAME["qwen2.5"]
    messages = [*PLAIN, *CALLING]
    encoded = encode(chat_tokenizer, form, messages, [WEATHER], train_on="completion")
    _, trained = expected(chat_tokenizer, form, messages, [WEATHER], [5, 7])
    assert encoded.samples.trained.tolist() == trained
    pair = {"prompt": PLAIN[:3], "completion": PLAIN[3:]}
    encoded = encoder(chat_tokenizer, form, train_on="completion")([("here", pair)])
    assert encoded.samples.trained.tolist() == expected(chat_tokenizer, form, PLAIN, None, [3])[1]


def test_everything_is_only_learnt_when_asked_for(chat_tokenizer):
    trained = encode(
        chat_tokenizer, BY_NAME["chatml"], PLAIN, train_on="everything"
    ).samples.trained
    assert trained.tolist() == [False] + [True] * (len(trained) - 1)


@pytest.mark.parametrize("name", ["chatml", "chatml marked"])
def test_answers_of_weight_zero_are_not_learnt(chat_tokenizer, name):
    form = BY_NAME[name]
    messages = [PLAIN[0], PLAIN[1] | {"weight": 0}, PLAIN[2], PLAIN[3] | {"weight": 1}]
    encoded = encode(chat_tokenizer, form, messages)
    assert encoded.samples.trained.tolist() == expected(chat_tokenizer, form, PLAIN, None, [3])[1]


def test_an_answer_without_an_end_is_told(chat_tokenizer):
    """GLM's text ends where the answer ends: nothing tells the model to stop."""
    assert encode(chat_tokenizer, BY_NAME["glm4"], PLAIN).report.notes == {NO_END: 2}
    assert encode(chat_tokenizer, BY_NAME["chatml"], PLAIN).report.notes == {}


UNENDED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Marks answers without the token that ends them."""


@pytest.mark.parametrize(
    ("choice", "ends", "notes"),
    [
        (None, [], {NO_END: 2}),
        ("turn", [1, 3], {}),
        ("all", [0, 1, 2, 3], {}),
        ("last", [3], {}),
    ],
)
def test_ends_of_turns_are_learnt_when_asked_for(chat_tokenizer, choice, ends, notes):
    rules = EncodingRules(4096, chat_template=UNENDED, train_on_eos=choice)
    encoded = RecordEncoder(chat_tokenizer, rules)([("here", {"messages": PLAIN})])
    sample = encoded.samples[0]
    end = chat_tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    assert sample.trained[sample.tokens == end].nonzero()[0].tolist() == ends
    answers = sample.tokens[sample.trained & (sample.tokens != end)]
    assert chat_tokenizer.detokenize(answers.tolist()) == PLAIN[1]["content"] + PLAIN[3]["content"]
    assert encoded.report.notes == notes


def test_a_special_token_that_ends_nothing_is_no_end(chat_tokenizer):
    """As ``</tool_call>`` and ``</think>`` are no ends."""
    hf = chat_tokenizer.hf
    other = next(name for name in CONTROL_TOKENS if name not in ("<|im_end|>", hf.eos_token))
    messages = [PLAIN[0], PLAIN[1] | {"content": "look" + other}]
    rules = EncodingRules(4096, chat_template=UNENDED)
    encoded = RecordEncoder(chat_tokenizer, rules)([("here", {"messages": messages})])
    assert encoded.report.notes[NO_END] == 1


def test_refusals_name_the_record_and_the_way_out(chat_tokenizer):
    gemma = BY_NAME["gemma"]
    with refused("here: ", "chat template", "System role not supported"):
        encode(chat_tokenizer, gemma, [{"role": "system", "content": "x"}, *PLAIN])
    with refused(
        "here: ", "dataset.split_turns=true", "dataset.train_on=last", "dataset.chat_template"
    ):
        encode(chat_tokenizer, BY_NAME["qwen3"], PLAIN)
    with refused("here: ", "begins with an answer", "weight 0"):
        encode(chat_tokenizer, BY_NAME["chatml"], PLAIN[1:])


def test_without_a_template_conversations_are_refused(tokenizer):
    with refused("no chat template", "dataset.chat_template"):
        RecordEncoder(tokenizer, EncodingRules(max_tokens=9))([("here", {"messages": PLAIN})])


# -------------------------------------------------------------------------------- templates x lengths x packing

WORDS = st.text(alphabet="abc ,.!?", min_size=1, max_size=12).map(lambda text: f"x{text}x")


@st.composite
def conversations(draw):
    """A form, messages that it can render, and tools."""
    form = draw(st.sampled_from(FORMS))
    messages = (
        [{"role": "system", "content": draw(WORDS)}] if form.system and draw(st.booleans()) else []
    )
    tools = [WEATHER] if form.tools and draw(st.booleans()) else None
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if tools and draw(st.booleans()):
            calls = [
                {
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": draw(WORDS)}},
                }
            ]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": draw(WORDS)})
        messages.append({"role": "assistant", "content": draw(WORDS)})
        if form.thinking and draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(WORDS)
    return form, messages, tools


QUICK = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@QUICK
@given(conversations(), st.sampled_from(["assistant", "last"]))
def test_masks_of_any_conversation(chat_tokenizer, conversation, train_on):
    check(chat_tokenizer, *conversation, train_on)


def naive_cut(ids, trained, limit, policy, opening):
    """The truncation policies token by token, on a list of (token, learnt)."""
    tokens = list(zip(ids, trained, strict=True))
    if len(tokens) <= limit:
        return tokens
    if policy == "drop":
        return None
    if policy == "right":
        return tokens[:limit]
    head = [tokens.pop(0)] if tokens[0][0] == opening else []
    if policy == "keep_answer":
        while not tokens[-1][1]:
            tokens.pop()
        start = len(tokens)
        while start and tokens[start - 1][1]:
            start -= 1
        context = min(start, 1)
        while len(tokens) - start + context + len(head) > limit:
            tokens.pop()
    cut = False
    while len(head) + len(tokens) > limit:
        tokens.pop(0)
        cut = True
    if cut and tokens:
        tokens[0] = (tokens[0][0], False)
    return head + tokens


@QUICK
@given(
    st.lists(conversations(), min_size=1, max_size=4),
    st.integers(4, 60),
    st.sampled_from(["drop", "left", "right", "keep_answer"]),
    st.sampled_from([1, 4]),
)
def test_cut_and_packed_masks_of_any_conversations(chat_tokenizer, batch, length, policy, multiple):
    length = length // multiple * multiple
    bos = chat_tokenizer.hf.bos_token_id
    kept, reasons, samples = [], {TOO_LONG: 0, NO_TARGET: 0}, []
    for form, messages, tools in batch:
        last = answers(messages)[-1:]
        if form.refuses(messages, tools, last):
            continue
        rules = {"max_tokens": length + 1, "truncation": policy, "train_on": "last"}
        encoded = encode(chat_tokenizer, form, messages, tools, **rules)
        cut = naive_cut(
            *expected(chat_tokenizer, form, messages, tools, last), length + 1, policy, bos
        )
        target = cut is not None and any(learnt for _, learnt in cut)
        reasons[TOO_LONG] += cut is None
        reasons[NO_TARGET] += cut is not None and not target
        kept += [cut] if target else []
        samples += list(encoded.samples)
        for reason in encoded.report.dropped:
            reasons[reason] -= encoded.report.dropped[reason]
    assert set(reasons.values()) == {0}, "every lost sample is counted under its reason"
    assert [
        list(zip(*map(np.ndarray.tolist, sample[:2]), strict=True)) for sample in samples
    ] == kept
    if samples:
        check_packed(samples, kept, length, multiple)


def check_packed(samples, kept, length, multiple):
    """Every sample is in one row, whole, from position 0, its targets in place; all else is not learnt."""
    rows = PackedRows(Samples.of(samples), length, padding=1, multiple=multiple)
    found, learnt = [], 0
    for place in range(len(rows)):
        row = rows[place]
        assert {key: len(row[key]) for key in ("tokens", "labels", "loss_mask")} == dict.fromkeys(
            ("tokens", "labels", "loss_mask"), length
        )
        bounds = row["cu_seqlens"].tolist()
        assert (bounds[0], bounds[-1]) == (0, length)
        for start, stop in pairwise(bounds):
            assert (stop - start) % multiple == 0
            assert row["position_ids"][start:stop].tolist() == list(range(stop - start))
            found.append(
                [row[key][start:stop].tolist() for key in ("tokens", "labels", "loss_mask")]
            )
        learnt += int(row["loss_mask"].sum())
    for sample in kept:
        count = len(sample) - 1
        inputs = [token for token, _ in sample][:-1]
        targets = [(token, float(flag)) for token, flag in sample][1:]
        matches = [
            part
            for part in found
            if part[0][:count] == inputs
            and list(zip(part[1], part[2], strict=True))[:count] == targets
        ]
        assert matches
        found.remove(matches[0])
    assert all(not sum(mask) for *_, mask in found), "what is left is padding"
    assert learnt == sum(flag for sample in kept for _, flag in sample)
