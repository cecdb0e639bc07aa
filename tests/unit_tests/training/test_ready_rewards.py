# SPDX-License-Identifier: Apache-2.0
"""Rewards that need no function: a judge behind a server, and reward models of transformers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from megatron.bridge.data.prompts.prompts import Prompt
from megatron.bridge.training.config import GRPOConfig
from megatron.bridge.training.config.blocks.reinforcement import JudgeConfig
from megatron.bridge.training.reinforcement import judge
from megatron.bridge.training.reinforcement.rewards import (
    ScoredCompletion,
    call_rewards,
    load_rewards,
)
from megatron.bridge.utils.errors import UserError

CHAT = [{"role": "user", "content": "3+4?"}]
COMPLETIONS = [
    ScoredCompletion(Prompt("a.jsonl:1", [1], "3+4=", {"answer": "7"}), [5], "7"),
    ScoredCompletion(Prompt("a.jsonl:2", [2], CHAT, {"answer": "8"}), [6], "eight"),
]


class FakeServer(BaseHTTPRequestHandler):
    """Replies with what the test sets for a word of the question."""

    replies: ClassVar[dict] = {}
    failures = 0
    questions: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).questions.append(body)
        if self.failures:
            type(self).failures -= 1
            self.send_response(503)
            self.end_headers()
            return
        question = body["messages"][-1]["content"]
        text = next(reply for word, reply in self.replies.items() if word in question)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "created": 0, "model": body["model"], "choices": [choice]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        payload = json.dumps({"object": "chat.completion", **answer, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(judge, "FIRST_PAUSE_SECONDS", 0.0)
    handler = type("Handler", (FakeServer,), {"questions": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{running.server_port}/v1"
    running.shutdown()
    running.server_close()


def rewards_of(address, **settings):
    block = JudgeConfig(base_url=address, model="strict", **settings)
    return call_rewards(load_rewards(GRPOConfig(judge=block)), COMPLETIONS)


def test_a_judge_scores_each_completion(server):
    handler, address = server
    handler.failures = 1  # which is repeated
    question = "{prompt} should be {answer}, and is seven or {completion}"
    handler.replies = {"is seven or 7": "The answer is right. 9", "is seven or eight": "2.5"}
    table = rewards_of(address, question=question)
    assert table.tolist() == [[pytest.approx(0.9)], [0.25]]
    asked = {body["messages"][0]["content"] for body in handler.questions}
    assert "3+4= should be 7, and is seven or 7" in asked
    assert {body["model"] for body in handler.questions} == {"strict"}


def test_a_reply_without_a_number_is_no_reward(server, capfd):
    handler, address = server
    handler.replies = {"eight": "I cannot say", "7": "11"}
    with pytest.raises(UserError, match=r"grpo\.judge.*strict.*grpo\.judge\.question"):
        rewards_of(address)
    handler.replies = {"eight": "I cannot say", "7": "10"}
    table = rewards_of(address)
    assert table[0, 0] == 1.0
    assert table[1, 0].isnan()
    assert "I cannot say" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": None}, ("grpo.judge", "model")),
        ({"question": "Is it good?"}, ("grpo.judge.question", "{completion}")),
        ({"question": "{completion} {nothing}"}, ("grpo.judge.question", "nothing", "answer")),
        ({"base_url": "http://127.0.0.1:9/v1", "retries": 0}, ("127.0.0.1:9", "server runs")),
    ],
)
def test_mistakes_in_a_judge(server, settings, words):
    block = JudgeConfig(**{"base_url": server[1], "model": "strict"} | settings)
    with pytest.raises(UserError) as refusal:
        call_rewards(load_rewards(GRPOConfig(judge=block)), COMPLETIONS)
    for word in words:
        assert word in str(refusal.value)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores") / "reward"
    letters = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    hf.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    hf.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(hf),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=hf.pad_token_id,
    )
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    return folder, hf, model.eval()


def test_a_reward_model_gives_its_scores(reward_model):
    folder, hf, model = reward_model
    names = [str(folder)]
    loaded = load_rewards(GRPOConfig(reward_funcs=names))
    assert [entry.name for entry in loaded] == ["reward"]
    table = call_rewards(loaded, COMPLETIONS)
    chat = hf.apply_chat_template(
        [*CHAT, {"role": "assistant", "content": "eight"}], tokenize=False
    )
    for text, reward in zip(["3+4=7", chat], table[:, 0].tolist(), strict=True):
        ids = torch.tensor([hf(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            assert reward == pytest.approx(model(ids).logits.item(), abs=1e-6)


def test_a_model_of_classes_is_no_reward(reward_model, tmp_path):
    folder, _, _ = reward_model
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "bad", "1": "good"}
    config["label2id"] = {"bad": 0, "good": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"grpo\.reward_funcs.*2 classes.*num_labels=1"):
        load_rewards(GRPOConfig(reward_funcs=[str(tmp_path)]))
