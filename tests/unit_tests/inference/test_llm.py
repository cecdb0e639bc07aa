# SPDX-License-Identifier: Apache-2.0
"""``LLM``, ``generate`` and ``chat`` with a toy that has a tokenizer and a chat template."""

import importlib.util
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.bridge.cli.chat import Conversation
from megatron.bridge.cli.main import main
from megatron.bridge.inference.engine import Detokenizer
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.prompts import PromptImages, TokensWithImages, end_tokens
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError
from tests import scripted_server  # noqa: F401 - makes the extra importable
from tests.families import harness
from tests.families.vision.rows import ROWS as VISION_ROWS
from tests.toy_models import make_llama
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.project.tree import ROOT

HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):  # noqa: F811
    directory = tmp_path_factory.mktemp("model")
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    hf.chat_template = TEMPLATE
    make_llama(directory, vocab_size=len(hf), max_position_embeddings=128)
    (directory / "chat_template.jinja").unlink()
    hf.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    return directory


@pytest.fixture
def llm(model_dir):
    with LLM(str(model_dir), dtype="float32", kv_memory=1 << 24) as made:
        yield made


def greedy_text(directory, prompt, count):
    hf = AutoTokenizer.from_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = hf(prompt, return_tensors="pt", add_special_tokens="<|turn|>" not in prompt)
    ends = [1, 5, 6, hf.convert_tokens_to_ids("<|end|>")]
    out = model.generate(
        **ids, max_new_tokens=count, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    return hf.decode(out[0, ids.input_ids.size(1) :], skip_special_tokens=True)


def test_texts_are_those_of_transformers(llm, model_dir):
    prompts = TEXT[:3]
    found = llm.generate(prompts, Sampling(max_new_tokens=20))
    assert [one[0].text for one in found] == [
        greedy_text(model_dir, prompt, 20) for prompt in prompts
    ]


def test_end_tokens_wait_for_the_minimum(llm, model_dir):
    """As transformers' ``min_new_tokens``; every token that greedy decoding chooses would end the text."""
    hf = AutoTokenizer.from_pretrained(model_dir)
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = hf(TEXT[0], return_tensors="pt")
    greedy = llm.generate(TEXT[0], Sampling(max_new_tokens=8))[0][0].tokens
    ends = sorted({1, 5, 6, hf.convert_tokens_to_ids("<|end|>"), *greedy})
    expected = model.generate(
        **ids,
        max_new_tokens=8,
        min_new_tokens=4,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
    )
    sampling = Sampling(max_new_tokens=8, min_new_tokens=4, stop_ids=greedy)
    (completion,) = llm.generate(TEXT[0], sampling)[0]
    assert completion.tokens == expected[0, ids.input_ids.size(1) :].tolist()
    assert len(completion.tokens) >= 4
    text = llm.generate(TEXT[0], Sampling(max_new_tokens=8))[0][0].text
    (later,) = llm.generate(TEXT[0], Sampling(max_new_tokens=8, min_new_tokens=6, stop=text[1]))[0]
    assert len(later.tokens) >= 6
    assert later.text.startswith(llm.hf.decode(greedy[:6]))


def test_reused_prefixes_are_counted_and_can_be_switched_off(model_dir):
    prompt = [*range(10, 50)]
    texts = []
    for reuse in (True, False):
        options = {"dtype": "float32", "kv_memory": 1 << 24, "chunk": 8, "prefix_reuse": reuse}
        with LLM(str(model_dir), **options) as llm:
            for _ in range(2):
                texts.append(llm.generate([prompt], Sampling(max_new_tokens=5, logprobs=0))[0])
            (lane,) = llm.engine.lanes
            # full chunks; the last token is computed for its logits
            counts = (lane.prefix_queries, lane.prefix_hits)
            assert counts == ((2 * len(prompt), 32) if reuse else (0, 0))
    assert all(text == texts[0] for text in texts)
    assert [text[0].cached_tokens for text in texts] == [0, 32, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(model_dir, tmp_path, capfd, value):
    """Loading and converting name the tensor and its file, and no empty text is generated."""
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    name = "model.layers.0.mlp.up_proj.weight"
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    file = broken / index["weight_map"][name]
    weights = load_file(file)
    weights[name][1, 2] = value
    save_file(weights, file, {"format": "pt"})
    words = f"{name} in {file.name} has NaN or infinite values"
    convert = ["convert", "--hf-model", str(broken), "--megatron-path", str(tmp_path / "megatron")]
    assert main([*convert, "--no-progress"]) == 0
    assert capfd.readouterr().err.count(words) == 1
    with LLM(str(broken), dtype="float32", kv_memory=1 << 24) as llm:
        assert capfd.readouterr().err.count(words) == 1
        with pytest.raises(UserError, match=r"not numbers \(NaN\)"):
            llm.generate(TEXT[:1], Sampling(max_new_tokens=3))
        with pytest.raises(UserError, match=r"not numbers \(NaN\)"):
            list(llm.stream(TEXT[0], Sampling(max_new_tokens=3, temperature=1.0)))


def test_weights_that_are_numbers_are_not_mentioned(model_dir, capfd):
    with LLM(str(model_dir), dtype="float32", kv_memory=1 << 24):
        assert "infinite" not in capfd.readouterr().err


def test_a_tokenizer_larger_than_the_embedding_is_noted(model_dir, tmp_path, capfd):
    larger = AutoTokenizer.from_pretrained(model_dir)
    size = len(larger)
    larger.add_tokens(["<new>", "<newer>"])
    larger.save_pretrained(tmp_path)
    with LLM(str(model_dir), dtype="float32", kv_memory=1 << 24, tokenizer=str(tmp_path)) as llm:
        assert f"has {size + 2} tokens and the model {size} embeddings" in capfd.readouterr().err
        with pytest.raises(UserError, match=f"{size + 1}"):
            llm.generate("<newer>", Sampling(max_new_tokens=1))


def test_a_conversation_uses_the_template(llm, model_dir):
    messages = [{"role": "user", "content": "Who?"}]
    expected = greedy_text(model_dir, "<|turn|>user\nWho?<|end|>\n<|turn|>assistant\n", 20)
    assert llm.chat(messages, Sampling(max_new_tokens=20)).text == expected


def test_all_ends_count(llm, model_dir):
    assert end_tokens(llm.hf, model_dir) == {1, 5, 6, llm.hf.convert_tokens_to_ids("<|end|>")}


def test_pieces_join_to_the_text(llm):
    sampling = Sampling(max_new_tokens=40, temperature=2.0, seed=3, ignore_eos=True)
    *pieces, completion = llm.stream("The quality", sampling)
    assert "".join(pieces) == completion.text == llm.generate("The quality", sampling)[0][0].text
    stopped = iter([False, False, True])
    *_, completion = llm.stream("The quality", sampling, lambda: next(stopped))
    assert (completion.finish_reason, len(completion.tokens)) == ("cancelled", 3)


def test_stop_texts_are_cut_off(llm):
    sampling = Sampling(max_new_tokens=40, temperature=2.0, seed=3, ignore_eos=True)
    whole = llm.generate("The quality", sampling)[0][0].text
    stop = whole[11:14]
    found = llm.generate("The quality", Sampling(**{**vars(sampling), "stop": [stop]}))[0][0]
    assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_several_choices_differ_and_one_alone_is_the_same(llm):
    sampling = Sampling(
        max_new_tokens=12, temperature=1.5, seed=8, n=4, ignore_eos=True, prompt_logprobs=0
    )
    (choices,) = llm.generate("To be", sampling)
    assert len({tuple(one.tokens) for one in choices}) == 4
    assert [one.choice for one in choices] == [0, 1, 2, 3]
    alone = llm.generate("To be", Sampling(**{**vars(sampling), "n": 1}))[0][0]
    assert alone.tokens == choices[0].tokens


def test_log_probabilities_of_texts(llm, model_dir):
    (found,) = llm.logprobs(TEXT[0], top=3)
    ids = llm.hf.encode(TEXT[0])
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(
            torch.tensor([ids])
        ).logits[0, :-1]
    expected = logits.log_softmax(-1)
    chosen = expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([one.logprob for one in found]), chosen, atol=1e-4, rtol=0
    )
    assert [list(one.top) for one in found] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([], {}, ["no tokens"]),
        ([3, 10**6], {}, ["1000000", "vocabulary"]),
        ([-1], {}, ["-1", "vocabulary"]),
        ([1] * 200, {}, ["200", "128", "shorten"]),
        ([1] * 120, {"max_new_tokens": 20}, ["max_new_tokens=20", "128"]),
        ([1], {"stop_ids": [10**6]}, ["1000000"]),
        ([1], {"logit_bias": {10**6: 1.0}}, ["1000000"]),
        (3, {}, ["int"]),
        ([{"role": "usr", "content": "x"}], {}, ["usr", "user"]),
        ([{"role": "user"}], {}, ["content"]),
    ],
)
def test_bad_prompts_are_named(llm, prompt, changes, words):
    with pytest.raises(UserError) as caught:
        list(llm.generate_each([[1], prompt], Sampling(**{"max_new_tokens": 4, **changes})))
    assert all(word in str(caught.value) for word in ["prompt", *words])
    assert llm.engine.is_idle


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8"}, ["float8", "bfloat16"]),
        ({"tp": 0}, ["tp=0"]),
        ({"max_context": 1000}, ["max_context=1000", "128"]),
        ({"kv_memory": 100}, ["kv_memory=100", "max_requests"]),
        ({"adapter": "nowhere"}, ["nowhere"]),
        ({"max_requests": 0}, ["max_requests"]),
    ],
)
def test_bad_options_are_named(model_dir, options, words):
    with pytest.raises(UserError) as caught:
        LLM(str(model_dir), **options)
    assert all(word in str(caught.value) for word in words)


def test_a_text_that_memory_cannot_hold_is_refused(model_dir):
    with LLM(str(model_dir), dtype="float32", kv_memory=1 << 16, max_requests=1) as llm:
        size = llm.engine.lanes[0].arena.size
        assert size < 100, "the context of 128 is larger"
        with pytest.raises(
            UserError, match=rf"a text of {size + 1} tokens .* kv_memory={1 << 16}.*: shorten it"
        ):
            llm.generate([[1] * 5], Sampling(max_new_tokens=size - 4))
        assert llm.engine.is_idle


@pytest.mark.parametrize(
    "options", [{"adapter": "/no"}, {"adapters": {"one": "/no"}}, {"tokenizer": "/no"}]
)
def test_wrong_paths_are_named_before_the_model_is_built(model_dir, monkeypatch, options):
    monkeypatch.setattr(GPTModelProvider, "provide_distributed_model", None)
    with pytest.raises(UserError, match="/no"):
        LLM(str(model_dir), **options)


def test_a_path_that_is_no_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing|holds no"):
        LLM(str(tmp_path))


@settings(deadline=None, max_examples=40)
@given(st.text(min_size=1, max_size=40))
def test_any_text_comes_back_in_pieces(text):
    hf = test_any_text_comes_back_in_pieces.hf
    ids = hf.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(hf)
    pieces = [detokenizer.add(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == hf.decode(ids, skip_special_tokens=True)


def test_words_behind_a_token_without_text_keep_their_space():
    """Tokenizers such as Llama 2's write no space before the first word that they decode."""
    words = {"<unk>": 0, "<pause>": 1, "▁to": 2, "▁be": 3}
    tokenizer = Tokenizer(BPE(words, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", additional_special_tokens=["<pause>"]
    )
    token_ids = [2, 3, 1, 1, 1, 2, 3]
    assert hf.decode(token_ids, skip_special_tokens=True) == "to be to be"
    detokenizer = Detokenizer(hf)
    pieces = [detokenizer.add(token) for token in token_ids] + [detokenizer.finish()]
    assert pieces == ["to", " be", "", "", "", " to", " be", ""]


@pytest.fixture(autouse=True)
def tokenizer_for_pieces(model_dir):
    test_any_text_comes_back_in_pieces.hf = AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "mistral3", "llava", "nemotron_h_omni"])
def test_the_text_model_of_a_vision_language_model(tmp_path, name):
    row = next(row for found, row in VISION_ROWS.items() if found.startswith(name))
    model = harness.hf_model(row)
    model.save_pretrained(tmp_path)
    prompt = [5, 9, 30, 31, 12]
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    with LLM(str(tmp_path), kv_memory=1 << 22) as llm:
        completion = llm.generate(prompt, Sampling(max_new_tokens=12, ignore_eos=True))[0][0]
        assert completion.tokens == found[0, 5:].tolist()


def test_images_for_a_model_without_a_tower_are_refused(llm):
    image = [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
    with pytest.raises(UserError, match=r"prompt 0.*images.*preprocessor_config\.json"):
        llm.chat(image)
    tokens = TokensWithImages([1, 2], PromptImages((), np.array([-1, 0])))
    with pytest.raises(UserError, match=r"images or audio.*no tower"):
        llm.engine.submit(tokens, Sampling())


# ---- commands ---------------------------------------------------------------------------------------------------


def generate(model_dir, folder, lines, *options):
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "--prompts",
        str(folder / "in.jsonl"),
        "--out",
        str(folder / "out.jsonl"),
        "--kv-memory",
        "16MB",
    ]
    return main(["generate", str(model_dir), *arguments, "--dtype", "float32", *options])


LINES = [
    {"prompt": "The gentle", "id": "a"},
    {"messages": [{"role": "user", "content": "who?"}], "max_new_tokens": 3},
    {"text": "Once", "temperature": 1.0, "logprobs": 1},
    {"input": [5, 9, 30], "n": 2, "temperature": 1.0},
]


def test_lines_are_written_in_order_and_resumed(model_dir, tmp_path, capsys):
    assert generate(model_dir, tmp_path, LINES, "--max-new-tokens", "6", "--seed", "1") == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["id"] for record in records] == ["a", 2, 3, 4]
    assert len(records[1]["tokens"]) <= 3
    assert len(records[3]["completions"]) == 2
    lines = whole.splitlines(keepends=True)
    for kept in (b"", lines[0], lines[0] + lines[1][:9], b"".join(lines[:3]) + b"{"):
        (tmp_path / "out.jsonl").write_bytes(kept)
        assert generate(model_dir, tmp_path, LINES, "--max-new-tokens", "6", "--seed", "1") == 0
        assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("change", ["prompt", "temperature"])
def test_completions_of_another_command_are_refused(model_dir, tmp_path, capsys, change):
    options = ("--max-new-tokens", "3", "--seed", "1")
    assert generate(model_dir, tmp_path, LINES[:1], *options) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    lines = [{**LINES[0], change: {"prompt": "The rough", "temperature": 0.5}[change]}]
    assert generate(model_dir, tmp_path, lines, *options) == 1
    error = capsys.readouterr().err
    assert "out.jsonl:1 with id='a'" in error
    assert "another --output" in error
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_without_a_file_completions_are_printed(model_dir, tmp_path, capsys):
    assert generate(model_dir, tmp_path, LINES, "--max-new-tokens", "8", "--seed", "3") == 0
    capsys.readouterr()
    words = [
        "--seed",
        "3",
        "--max-new-tokens",
        "8",
        "--prompts",
        str(tmp_path / "in.jsonl"),
        "--kv-memory",
        "16MB",
        "--dtype",
        "float32",
    ]
    assert main(["generate", str(model_dir), *words]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    stored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for record in stored:
        del record["request"]
    assert printed == stored
    assert main(["generate", str(model_dir), "--prompt", "a", "--out", str(tmp_path / "o")]) == 1
    assert "--output is for --prompts" in capsys.readouterr().err


def test_prompts_are_not_overwritten(model_dir, tmp_path, capsys):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    files = ["--prompts", str(prompts), "--out", f"{tmp_path}/./in.jsonl"]
    assert main(["generate", str(model_dir), *files]) == 1
    error = capsys.readouterr().err
    assert "--out" in error
    assert "prompts" in error
    assert prompts.read_text() == '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["in.jsonl:7", "JSON"]),
        ("[1]", ["in.jsonl:7", "object"]),
        ('{"prompt": "a", "promt": 1}', ["in.jsonl:7", "promt", "prompt"]),
        ('{"prompt": "a", "text": "b"}', ["in.jsonl:7", "prompt and text"]),
        ('{"id": 1}', ["in.jsonl:7", "no prompt"]),
        ('{"prompt": 3}', ["in.jsonl:7", "int"]),
        ('{"messages": []}', ["in.jsonl:7", "messages"]),
        ('{"messages": [{"role": "me", "content": "x"}]}', ["in.jsonl:7", "me"]),
        ('{"prompt": "a", "id": 1}', ["in.jsonl:7", "in.jsonl:1"]),
        ('{"prompt": "a", "id": null}', ["in.jsonl:7", "id"]),
        ('{"prompt": "a", "temperature": NaN}', ["in.jsonl:7", "temperature"]),
        ('{"prompt": "a", "top_p": 7}', ["in.jsonl:7", "top_p"]),
        ('{"prompt": [9999999]}', ["in.jsonl:7", "vocabulary"]),
        ('{"prompt": []}', ["in.jsonl:7", "no tokens"]),
    ],
)
def test_a_bad_line_is_named_before_anything_is_computed(model_dir, tmp_path, capsys, line, words):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a"}\n' * 6 + line + "\n" + '{"prompt": "a"}\n' * 3
    )
    arguments = ["--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert (
        main(
            ["generate", str(model_dir), *arguments, "--kv-memory", "16MB", "--max-new-tokens", "4"]
        )
        == 1
    )
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words)
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def test_another_output_file_is_not_touched(model_dir, tmp_path, capsys):
    (tmp_path / "out.jsonl").write_text('{"id": "other"}\n')
    assert generate(model_dir, tmp_path, LINES) == 1
    assert "other" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == '{"id": "other"}\n'


def test_one_prompt_is_printed(model_dir, capsys):
    arguments = [
        "--prompt",
        "The gentle",
        "--max-new-tokens",
        "9",
        "--dtype",
        "float32",
        "--kv-memory",
        "16M",
    ]
    assert main(["generate", str(model_dir), *arguments]) == 0
    assert capsys.readouterr().out == greedy_text(model_dir, "The gentle", 9) + "\n"


def test_a_chat_in_the_terminal(llm, tmp_path):
    sampling = Sampling(max_new_tokens=5)
    written = io.StringIO()
    talk = Conversation(llm, sampling, "Be brief.")
    path = tmp_path / "chat.json"
    said = iter(
        [
            "who?",
            "more",
            "/undo",
            "/seed 4",
            "/nonsense",
            f"/save {path}",
            "/seed x",
            "",
            "/quit",
            "not read",
        ]
    )
    talk.run(lambda: next(said), written.write)
    answer = llm.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "who?"}], sampling
    )
    saved = json.loads(path.read_text())["messages"]
    assert [message["content"] for message in saved] == ["Be brief.", "who?", answer.text]
    assert talk.sampling.seed == 4
    assert "commands:" in written.getvalue()
    assert "error: /seed x" in written.getvalue()
    talk.run(iter(["/reset", None]).__next__, written.write)
    assert len(talk.messages) == 1
    (tmp_path / "a.png").write_bytes(b"")
    lines = iter([f"/image {tmp_path / 'none.png'}", f"/image {tmp_path / 'a.png'}", "what?", None])
    talk.run(lines.__next__, written.write)
    assert f"error: /image {tmp_path / 'none.png'}" in written.getvalue()
    assert "the prompt has images" in written.getvalue()
    assert len(talk.messages) == 1


# ---- scripts ----------------------------------------------------------------------------------------------------


def script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_a_script_compares_with_transformers(model_dir, capsys):
    options = ["--hf_model_path", str(model_dir), "--prompt", "The gentle", "--dtype", "float32"]
    assert script("examples/conversion/compare_text_generation.py")(options) == 0
    assert "the same tokens" in capsys.readouterr().out
    assert script("examples/conversion/hf_to_megatron_generate_text.py")(options) == 0
    assert capsys.readouterr().out == "The gentle" + greedy_text(model_dir, "The gentle", 20) + "\n"


def test_a_script_takes_the_options_of_the_api(model_dir, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "The gentle"}\n{"text": "Once"}\n')
    options = ["--hf_model_path", str(model_dir), "--prompt-file", str(tmp_path / "in.jsonl")]
    options += ["--prompt-file-num-truncate", "1", "--return-log-probs", "--max_new_tokens", "5"]
    options += [
        "--use-legacy-generation",
        "--kv_cache_buffer_size_gb",
        "0.01",
        "--dtype",
        "float32",
    ]
    assert script("scripts/inference/text_generation.py")(options) == 0
    written = capsys.readouterr()
    (record,) = [json.loads(line) for line in written.out.splitlines()]
    assert record["text"] == greedy_text(model_dir, "The gentle", 5)
    assert len(record["logprobs"]) == len(record["tokens"])
    assert "--use-legacy-generation has no effect" in written.err
    with pytest.raises(UserError, match="--hf_model_path"):
        script("scripts/inference/text_generation.py")(["--prompt", "x"])


@pytest.mark.sampled
def test_a_script_asks_for_all_prompts_at_once(model_dir, capsys):
    prompts, run = ["The gentle", "Once"], script("scripts/inference/async_text_generation.py")
    options = ["--hf_model_path", str(model_dir), "--prompt", prompts[0], "--prompt", prompts[1]]
    options += ["--kv_cache_buffer_size_gb", "0.01", "--dtype", "float32", "--max_new_tokens"]
    assert run([*options, "5", "--coordinator-port", "1"]) == 0
    written = capsys.readouterr()
    records = sorted(map(json.loads, written.out.splitlines()), key=lambda record: record["index"])
    assert [record["text"] for record in records] == [
        greedy_text(model_dir, prompt, 5) for prompt in prompts
    ]
    assert "--coordinator-port has no effect" in written.err
    with pytest.raises(UserError, match="exceed the context"):
        run([*options, "5000"])


# ---- tools, reasoning and structured answers --------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TEMPLATE.split("{% if add_gen", maxsplit=1)[0]
    + "{% if add_generation_prompt %}<|turn|>assistant\n{% if not thinking %}<think></think>{% endif %}{% endif %}"
    + "{# <tool_call> #}"
)  # fmt: skip
DAYS = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
SCHEMA = {**DAYS, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION = [{"role": "user", "content": "Rome?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "days", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def tool_dir(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(model_dir, directory)
    hf = AutoTokenizer.from_pretrained(model_dir)
    make_llama(directory, vocab_size=len(hf), max_position_embeddings=1024)
    hf.chat_template = TOOL_TEMPLATE
    hf.save_pretrained(directory)
    return directory


@pytest.mark.skipif(not HAS_GRAMMARS, reason="no llguidance: run scripts/extra.sh serve")
def test_chats_with_tools_and_structures(tool_dir):
    sampling = Sampling(max_new_tokens=200, temperature=1.0, seed=1)
    with LLM(str(tool_dir), dtype="float32", kv_memory=1 << 25) as llm:
        answer = llm.chat(
            QUESTION, sampling, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = answer.message["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["days"] in (1, 2)
        assert answer.message["content"] is None
        assert "<tool_call>" in answer.text
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
        history = [*QUESTION, answer.message, result]
        next_answer = llm.chat(history, Sampling(max_new_tokens=4), tools=[TOOL])
        assert next_answer.message == {"role": "assistant", "content": next_answer.text}
        structured = llm.chat(QUESTION, sampling, response_format=FORMAT)
        assert json.loads(structured.message["content"])["days"] in (1, 2)
        thinking = llm.chat(
            QUESTION, Sampling(max_new_tokens=9), chat_template_kwargs={"thinking": True}
        )
        assert thinking.message["content"] == thinking.text
        for options, words in (
            ({"tools": [TOOL], "tool_choice": "always"}, ["tool_choice", "required"]),
            ({"tools": [{"name": "weather"}]}, ["tools", "type"]),
            ({"chat_template_kwargs": {"thinkin": 1}}, ["thinkin", "thinking"]),
            ({"response_format": {"type": "json_schema"}}, ["json_schema"]),
        ):
            with pytest.raises(UserError) as error:
                llm.chat(QUESTION, sampling, **options)
            assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.skipif(not HAS_GRAMMARS, reason="no llguidance: run scripts/extra.sh serve")
def test_lines_with_tools(tool_dir, tmp_path, capsys):
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    lines = [
        {"messages": QUESTION, **forced},
        {"messages": QUESTION, "response_format": FORMAT},
        {"messages": QUESTION, "max_new_tokens": 3},
    ]
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--temperature", "1", "--seed", "1", "--kv-memory", "32MB", "--dtype", "float32"]
    command = ["generate", str(tool_dir), "--prompts", str(prompts), *options]
    assert main(command) == 0
    called, structured, plain = map(json.loads, capsys.readouterr().out.splitlines())
    (call,) = called["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["days"] in (1, 2)
    assert json.loads(structured["text"])["days"] in (1, 2)
    assert "message" not in plain
    prompts.write_text(json.dumps({**lines[0], "tools": "weather"}))
    assert main(command) == 1
    assert "in.jsonl:1: tools" in capsys.readouterr().err


def test_a_chat_with_tools_in_the_terminal(tmp_path):
    """The user types the result of a call, and the model goes on."""
    answers = [
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "call_1", "function": {"name": "weather", "arguments": '{"days": 1}'}}]},
        {"role": "assistant", "content": "Rain."},
    ]  # fmt: skip
    asked = []

    class Scripted:
        def stream(self, record, sampling, stopped):
            asked.append(json.loads(json.dumps(record)))
            yield "..."
            yield SimpleNamespace(message=answers[len(asked) - 1])

    written = io.StringIO()
    talk = Conversation(Scripted(), Sampling(), None, [TOOL])
    said = iter(["Rome?", "It rains.", f"/save {tmp_path / 'chat.json'}", "/quit"])
    talk.run(lambda: next(said), written.write)
    assert 'call weather({"days": 1})' in written.getvalue()
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It rains."}
    assert asked[1] == {"messages": [*QUESTION, answers[0], result], "tools": [TOOL]}
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == {"messages": [*QUESTION, answers[0], result, answers[1]], "tools": [TOOL]}
