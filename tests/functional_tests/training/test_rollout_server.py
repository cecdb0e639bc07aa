# SPDX-License-Identifier: Apache-2.0
"""Completions of a server: its requests and replies are those that vLLM 0.32 and SGLang 0.5 have.

The server is transformers' model behind these requests. It reads the weights of the run from a folder, as the engines
do, so its log-probabilities are those of training only if every update arrives.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config.blocks.reinforcement import RolloutServerConfig
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.training.test_grpo import alone, places, run  # noqa: F401 - a fixture
from tests.workers import leave

PROMPTS_OF_STEP = 2


class Engine:
    """Transformers' model, its updates, and the requests that came."""

    def __init__(self, model, loads):
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.loads = loads
        self.updates = 0
        self.requests = []
        self.lock = threading.Lock()  # of the model, and of the random numbers

    def load(self, folder):
        self.updates += 1
        if self.loads:
            weights = {}
            for file in Path(folder).glob("*.safetensors"):
                weights |= load_file(file)
            self.model.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def write(self, prompt, limit, ends):
        ids, log_probs = list(prompt), []
        while len(ids) < len(prompt) + limit:
            row = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1))
            ids.append(token)
            log_probs.append(row[token].item())
            if token in ends:
                return ids[len(prompt) :], log_probs, "stop"
        return ids[len(prompt) :], log_probs, "length"

    def answer(self, path, body):
        self.requests.append((path, body))
        match path:
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.load(body["kwargs"]["weights_path"])
                return {"results": [None]}
            case "/update_weights_from_disk":
                self.load(body["model_path"])
                return {"success": True, "message": "Succeeded"}
            case "/reset_prefix_cache" | "/flush_cache":
                return {"success": True}
            case "/v1/models":
                return {"data": [{"id": "policy"}]}
            case "/v1/completions":
                assert body["model"] == "policy"
                assert body["return_token_ids"]
                written = [
                    self.write(body["prompt"], body["max_tokens"], body["stop_token_ids"])
                    for _ in range(body["n"])
                ]
                return {
                    "choices": [
                        {
                            "index": index,
                            "token_ids": tokens,
                            "logprobs": {"token_logprobs": log_probs},
                            "finish_reason": reason,
                        }
                        for index, (tokens, log_probs, reason) in enumerate(written)
                    ]
                }
            case "/generate":
                sampling = body["sampling_params"]
                written = [
                    self.write(
                        body["input_ids"], sampling["max_new_tokens"], sampling["stop_token_ids"]
                    )
                    for _ in range(sampling["n"])
                ]
                replies = [
                    {
                        "output_ids": tokens,
                        "meta_info": {
                            "finish_reason": {"type": reason},
                            "output_token_logprobs": [
                                [log_prob, token, None]
                                for log_prob, token in zip(log_probs, tokens, strict=True)
                            ],
                        },
                    }
                    for tokens, log_probs, reason in written
                ]
                return replies[0] if len(replies) == 1 else replies
        return None


@contextmanager
def serving(model, loads=True):
    engine = Engine(model, loads)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or "{}")
            with engine.lock:
                answer = engine.answer(self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = reply

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield engine, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


def settings_of(url, folder, **options):
    server = RolloutServerConfig(base_url=url, weights_dir=str(folder), **options)
    return {"server": server, "importance_sampling_correction": True, "num_iterations": 2}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_each_generation_has_the_weights_of_the_run(places, tmp_path, engine, peft):  # noqa: F811
    adapters = LoRA(dim=4) if peft else None
    with serving(places / "model") as (server, url):
        settings = settings_of(url, tmp_path / "weights", engine=engine)
        watch = alone(places, settings, peft=adapters)
    assert server.updates == 2
    for step in watch.steps[::2]:
        assert step["sampler mismatch max"] < 2e-5
    asked = [body for path, body in server.requests if path in ("/v1/completions", "/generate")]
    assert len(asked) == 2 * PROMPTS_OF_STEP
    assert watch.rollouts[0][0].tokens
    assert watch.steps[0]["grad norm"] > 0


def on_two_ranks(root, url, folder, layout):
    return run(root, settings_of(url, folder), layout=layout).steps


def test_two_ranks_ask_once(places, tmp_path, two_workers):  # noqa: F811
    with serving(places / "model") as (server, url):
        layout = {"tensor_model_parallel_size": 2}
        first, second = two_workers.run(on_two_ranks, places, url, tmp_path / "weights", layout)
    assert first == second
    assert server.updates == 2
    assert sum(path == "/v1/completions" for path, _ in server.requests) == 2 * PROMPTS_OF_STEP
    assert all(step["sampler mismatch max"] < 2e-5 for step in first[::2])


def test_a_server_with_other_weights_ends_the_run(places, tmp_path):  # noqa: F811
    with serving(places / "other", loads=False) as (_, url), pytest.raises(UserError) as refusal:
        alone(places, settings_of(url, tmp_path / "weights"))
    leave()
    message = str(refusal.value)
    assert "grpo.server.max_mismatch=0.2" in message
    assert url in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights_dir": None}, ["grpo.server needs base_url", "weights_dir", "None"]),
        ({"base_url": "http://127.0.0.1:9"}, ["grpo.server.base_url=http://127.0.0.1:9", "runs"]),
        ({"base_url": "{url}/other"}, ["/collective_rpc answers 404", "VLLM_SERVER_DEV_MODE=1"]),
    ],
)
def test_bad_servers_are_refused(places, tmp_path, options, words):  # noqa: F811
    with serving(places / "model") as (_, url):
        given = {"base_url": url, "weights_dir": str(tmp_path / "weights")} | options
        given["base_url"] = given["base_url"].format(url=url)
        settings = {"server": RolloutServerConfig(**given)}
        with pytest.raises(UserError) as refusal:
            alone(places, settings)
    leave()
    for word in words:
        assert word in str(refusal.value)
