# SPDX-License-Identifier: Apache-2.0
"""Named adapters over one base: each text is what it is alone, and what the peft library computes."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.bridge.backends.decoding.op_recorder import record
from megatron.bridge.cli.main import main
from megatron.bridge.inference import decoding_graphs
from megatron.bridge.inference.adapter_bank import add_adapters
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.scripted_server import HAS_SERVER, LocalEngine, scripted_server
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_decoding_graphs import recorded  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture

PROMPTS = [[5, 9, 11, 2, 7], [5, 9, 11, 2, 7], [5, 9, 11, 2, 7], [3, 3, 8], list(range(2, 40))]
NAMES = ["small", "wide", None, "wide", "small"]
TARGETS = {
    "small": ["q_proj", "v_proj"],
    "wide": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head"],
}
OPTIONS = {"dtype": "float32", "kv_memory": 1 << 24, "chunk": 16}


def make_adapter(base, directory, name, targets, **options):
    torch.manual_seed(len(targets))
    config = peft.LoraConfig(
        r=8, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM", **options
    )
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config
    )
    for parameter in (it for it in model.parameters() if it.requires_grad):
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory / name)
    return str(directory / name)


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):  # noqa: F811
    directory = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(model_dir, directory, name, targets) for name, targets in TARGETS.items()
    }


def sampling(name, **more):
    return Sampling(
        max_new_tokens=4, prompt_logprobs=0, logprobs=0, adapter_name=name, ignore_eos=True, **more
    )


def numbers(completions):
    return [
        (one[0].tokens, [it.logprob for it in (*one[0].prompt_logprobs, *one[0].logprobs)])
        for one in completions
    ]


def answers(llm, prompts=PROMPTS, names=NAMES):
    return numbers(llm.generate(prompts, [sampling(name) for name in names]))


def reference(base, adapter, tokens):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_texts_with_different_adapters_in_one_batch(model_dir, adapters):  # noqa: F811
    with LLM(str(model_dir), adapters=adapters, **OPTIONS) as llm:
        together = answers(llm)
        alone = [
            answers(llm, [prompt], [name])[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)
        ]
    assert together == alone  # bitwise
    assert (
        len({tuple(tokens) + tuple(logprobs) for tokens, logprobs in together[:3]}) == 3
    )  # no cache is shared
    for prompt, name, (tokens, logprobs) in zip(PROMPTS, NAMES, together, strict=True):
        expected = reference(model_dir, adapters.get(name), prompt + tokens)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_one_of_the_adapters_is_the_one_loaded_by_itself(model_dir, adapters):  # noqa: F811
    with LLM(str(model_dir), adapter=adapters["wide"], **OPTIONS) as llm:
        expected = numbers(llm.generate(PROMPTS, sampling(None)))
    with LLM(str(model_dir), adapters=adapters, **OPTIONS) as llm:
        assert_close(answers(llm, names=["wide"] * len(PROMPTS)), expected)


def test_replayed_steps_with_an_adapter_have_the_same_bits(model_dir, adapters):  # noqa: F811
    found = []
    for graphs in (True, False):
        with LLM(str(model_dir), adapter=adapters["wide"], graphs=graphs, **OPTIONS) as llm:
            found.append(numbers(llm.generate(PROMPTS, sampling(None))))
    assert found[0] == found[1]


def test_replayed_steps_of_several_adapters_have_the_same_bits(
    model_dir,  # noqa: F811
    adapters,
    monkeypatch,
):
    recordings = []
    monkeypatch.setattr(
        decoding_graphs, "record", lambda forward: recordings.append(forward) or record(forward)
    )
    only_small = ["small"] * 2
    mixes = [NAMES, only_small, [None, None], ["small", None], ["wide", "small"], NAMES]
    found = []
    for graphs in (False, True):
        with LLM(str(model_dir), adapters=adapters, graphs=graphs, **OPTIONS) as llm:
            found.append([answers(llm, PROMPTS[: len(names)], names) for names in mixes])
            assert (llm.engine.replay_obstacle is None) == graphs
    assert found[0] == found[1]
    assert len(recordings) == 3  # of all texts with one adapter, of all without, and of any mix


def test_graphs_of_several_adapters_give_the_same_texts(
    model_dir,  # noqa: F811
    adapters,
    recorded,  # noqa: F811
):
    mixes = [NAMES, ["wide"] * 2, [None] * 2, ["wide", "small"]]
    found = []
    for graphs in (False, True):
        assert recorded == []
        with LLM(str(model_dir), adapters=adapters, graphs=graphs, **OPTIONS) as llm:
            found.append([answers(llm, PROMPTS[: len(names)], names) for names in mixes])
    for captured, stepped in zip(found[1], found[0], strict=True):
        assert_close(captured, stepped)
    # of any mix, of all texts with one adapter, and of all without
    assert [graph.replays for graph in recorded] == [6, 3, 3]


def test_replay_forgets_adapters_that_are_unloaded(model_dir, adapters):  # noqa: F811
    names = ["a", None, "a"]
    with LLM(str(model_dir), adapters={"a": adapters["wide"]}, graphs=False, **OPTIONS) as llm:
        expected = answers(llm, PROMPTS[:3], names)
    with LLM(str(model_dir), max_adapters=1, **OPTIONS) as llm:
        llm.load_adapter("a", adapters["small"])
        before = answers(llm, PROMPTS[:3], names)
        llm.unload_adapter("a")
        llm.load_adapter("a", adapters["wide"])
        assert answers(llm, PROMPTS[:3], names) == expected != before


def assert_close(found, expected):
    for (tokens, logprobs), (want, close) in zip(found, expected, strict=True):
        assert tokens == want
        assert logprobs == pytest.approx(close, abs=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_two_ranks(model_dir, adapters, layout):  # noqa: F811
    with LLM(str(model_dir), adapters=adapters, **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(str(model_dir), adapters=adapters, max_adapters=3, **layout, **OPTIONS) as llm:
        assert_close(answers(llm), expected)
        with pytest.raises(UserError, match="none"):
            llm.load_adapter("late", "none")
        llm.load_adapter("late", adapters["small"])
        llm.unload_adapter("small")
        names = ["late" if name == "small" else name for name in NAMES]
        assert_close(answers(llm, names=names), expected)


def test_mistakes(model_dir, adapters, tmp_path, capsys):  # noqa: F811
    with LLM(str(model_dir), adapters=adapters, **OPTIONS) as llm:
        with pytest.raises(UserError, match=r"'smal'.*small.*one of small, wide"):
            llm.generate(PROMPTS, sampling("smal"))
        assert answers(llm, PROMPTS[:1], ["small"])
    with pytest.raises(UserError, match=r"--adapter .*--adapters"):
        LLM(str(model_dir), adapters=adapters, adapter=adapters["wide"], **OPTIONS)
    whole = make_adapter(model_dir, tmp_path, "whole", ["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(UserError, match=r"lm_head|whole"):
        LLM(str(model_dir), adapters={"whole": whole}, **OPTIONS)
    for wrong in ("no-name", "=x", "x=", "x=1 x=2"):
        options = [it for text in wrong.split() for it in ("--adapters", text)]
        with pytest.raises(SystemExit):
            main(["generate", str(model_dir), "--prompt", "x", *options])
        assert "NAME=DIR" in capsys.readouterr().err


def test_adapters_of_experts_are_refused(family_case):
    case = family_case("qwen3_moe")
    _, chunks = harness.build(case, "one")
    method = LoRA(target_modules=["linear_fc1"], dim=2)
    with pytest.raises(UserError, match=r"experts.*--adapter"):
        add_adapters(chunks, {"x": "y"}, lambda *_: method(chunks, False))


# ---- adapters that come and go ----------------------------------------------------------------------------------


def test_adapters_that_are_loaded_later_are_those_loaded_first(model_dir, adapters):  # noqa: F811
    """Bitwise, and a name can get other weights: no cache of the old ones is reused."""
    prompts = [list(range(2, 60))] * 3
    names = ["small", "wide", None]
    with LLM(str(model_dir), adapters=adapters, graphs=False, **OPTIONS) as llm:
        expected = answers(llm, prompts, names)
    with LLM(str(model_dir), max_adapters=2, **OPTIONS) as llm:
        base = answers(llm, prompts[:1], [None])
        for name, path in adapters.items():
            llm.load_adapter(name, path)
        assert answers(llm, prompts, names) == expected
        assert answers(llm, prompts[:1], [None]) == base == expected[2:]
        with pytest.raises(UserError, match=r"max_adapters=2.*unload"):
            llm.load_adapter("third", adapters["wide"])
        with pytest.raises(UserError, match=r"'small' is loaded.*unload"):
            llm.load_adapter("small", adapters["wide"])
        llm.unload_adapter("small")
        with pytest.raises(UserError, match="adapter_name='small'"):
            answers(llm, prompts[:1], ["small"])
        llm.load_adapter("small", adapters["wide"])
        assert answers(llm, prompts[:1], ["small"]) == expected[1:2]
        for name in ("small", "wide"):
            llm.unload_adapter(name)
        assert answers(llm, prompts[:1], [None]) == base


def test_an_adapter_that_cannot_be_used_changes_nothing(model_dir, adapters, tmp_path):  # noqa: F811
    whole = make_adapter(model_dir, tmp_path, "head", ["q_proj"], modules_to_save=["lm_head"])
    with LLM(str(model_dir), adapters={"wide": adapters["wide"]}, max_adapters=4, **OPTIONS) as llm:
        before = answers(llm, PROMPTS[:2], ["wide", None])
        for path in (whole, str(tmp_path)):
            with pytest.raises(UserError):
                llm.load_adapter("bad", path)
            assert answers(llm, PROMPTS[:2], ["wide", None]) == before
        llm.load_adapter("small", adapters["small"])
        assert answers(llm, PROMPTS[:2], ["wide", None]) == before
    with (
        LLM(str(model_dir), **OPTIONS) as fixed,
        pytest.raises(UserError, match="max_adapters"),
    ):
        fixed.load_adapter("small", adapters["small"])
    with pytest.raises(UserError, match=r"max_adapters=1.*base model"):
        LLM(str(model_dir), adapter=adapters["wide"], max_adapters=1, **OPTIONS)


def test_running_texts_of_an_unloaded_adapter_end_first(model_dir, adapters):  # noqa: F811
    from megatron.bridge.inference.server.engine_loop import (
        Accepted,
        EngineLoop,
        LoadAdapter,
        RefusedRequest,
        Submit,
        UnloadAdapter,
    )

    with LLM(str(model_dir), adapters=adapters, max_adapters=4, **OPTIONS) as llm:
        (expected,) = llm.generate([PROMPTS[0]], [sampling("wide")])
        loop = EngineLoop(llm.engine, llm.adapter_changes)
        assert list(loop.apply([Submit(1, PROMPTS[0], sampling("wide"))])) == [Accepted(1)]
        first = list(loop.step())
        refused = loop.apply(
            [
                UnloadAdapter(2, "wide"),
                Submit(3, PROMPTS[0], sampling("wide")),
                LoadAdapter(4, "wide", adapters["small"]),
            ]
        )
        assert [(type(event), event.id) for event in refused] == [
            (RefusedRequest, 3),
            (RefusedRequest, 4),
        ]
        tokens = [token for event in first for token in event.tokens]
        while loop.is_busy:
            assert list(loop.apply([])) == []
            tokens += [token for event in loop.step() for token in event.tokens]
        assert tokens == expected[0].tokens
        assert list(loop.apply([])) == [Accepted(2)]
        assert list(loop.apply([LoadAdapter(5, "wide", adapters["small"])])) == [Accepted(5)]


@pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")
def test_clients_load_and_unload_adapters(model_dir, adapters, tmp_path):  # noqa: F811
    from openai import APIStatusError

    root = Path(adapters["small"]).parent

    def change(client, action, **body):
        return client.post(f"/{action}_lora_adapter", body=body, cast_to=str)

    def refusal(client, action, **body):
        with pytest.raises(APIStatusError) as error:
            change(client, action, **body)
        return error.value.status_code, error.value.message

    ask = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0}
    with LLM(str(model_dir), max_adapters=2, **OPTIONS) as llm:
        engine = LocalEngine(llm.engine, llm.adapter_changes)
        with scripted_server(llm.hf, [], context=128, engine=engine, adapter_root=root) as (
            client,
            _,
        ):
            before = client.completions.create(model="toy", **ask).choices[0].text
            change(client, "load", lora_name="math", lora_path="wide")
            assert [model.id for model in client.models.list()] == ["toy", "math"]
            answer = client.completions.create(model="math", **ask)
            how = Sampling(max_new_tokens=5, adapter_name="math")
            assert answer.choices[0].text == llm.generate([PROMPTS[0]], how)[0][0].text
            assert answer.model == "math"
            assert refusal(client, "load", lora_name="math", lora_path="small")[0] == 400
            assert refusal(client, "load", lora_name="toy", lora_path="small")[0] == 400
            assert refusal(client, "load", lora_name="x", lora_path="nothing")[0] == 404
            for outside in ("..", "/etc", "small/../.."):
                status, message = refusal(client, "load", lora_name="x", lora_path=outside)
                assert (status, "--adapter-root" in message) == (403, True)
            change(client, "load", lora_name="other", lora_path=adapters["small"])
            status, message = refusal(client, "load", lora_name="x", lora_path="small")
            assert (status, "unload" in message) == (400, True)
            change(client, "unload", lora_name="math")
            assert [model.id for model in client.models.list()] == ["toy", "other"]
            assert refusal(client, "unload", lora_name="math")[0] == 404
            with pytest.raises(APIStatusError, match="math"):
                client.completions.create(model="math", **ask)
            assert client.completions.create(model="toy", **ask).choices[0].text == before
        with scripted_server(llm.hf, [], context=128, engine=engine) as (client, _):
            status, message = refusal(client, "load", lora_name="x", lora_path="small")
            assert (status, "--adapter-root" in message) == (403, True)
