# SPDX-License-Identifier: Apache-2.0
"""A training service in a process of its own, and a client that sends the requests of Tinker's client as JSON."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec

from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/serve"  # where scripts/extra.sh installs it
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))
HAS_SERVER = find_spec("uvicorn") is not None

OPTIONS = ["--dtype", "float32", "--kv-memory", "16MB", "--port", "0"]


@contextmanager
def started_service(directory, root, *options, name="toy", **environment):
    """The address of a service; it ends with the context."""
    command = [sys.executable, "-m", "megatron.bridge.cli.main", "serve", str(directory)]
    command += ["--train", str(root), *OPTIONS, "--name", name, *options]
    path = f"{ROOT / 'src'}:{BESIDE}"
    variables = os.environ | environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith(f"serving {name} at http://127.0.0.1:"), line
            yield line.split()[-1]
        finally:
            process.terminate()


class RefusedError(Exception):
    """A request that the service refuses: the status, or 200 for one that failed later, and the message."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Client:
    """A session."""

    def __init__(self, address, key="tml-of-nobody"):
        self.address = address
        self.key = key
        self.models = 0
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        answer = self.post("create_session", body)
        self.session = answer["session_id"]
        self.warning = answer["warning_message"]

    def fetch(self, path, body=None, **headers):
        """The status and the bytes of an answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-API-Key": self.key, **headers}
        request = urllib.request.Request(f"{self.address}/api/v1/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def post(self, path, body):
        status, text = self.fetch(path, body)
        answer = json.loads(text)
        if status != 200:
            raise RefusedError(status, answer["error"]["message"])
        return answer

    def wait(self, answer):
        """The result of a request that has been accepted."""
        status = 408
        while status == 408:
            status, text = self.fetch("retrieve_future", {"request_id": answer["request_id"]})
        result = json.loads(text)
        if status != 200:
            raise RefusedError(status, result["error"]["message"])
        if "error" in result:
            raise RefusedError(status, result["error"])
        return result

    def call(self, path, body):
        return self.wait(self.post(path, body))

    def create(self, **config):
        """A new model."""
        number = self.models
        self.models += 1
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": "toy",
            "lora_config": {"rank": 4, "seed": 1, **config},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        return TrainedModel(self, self.call("create_model", body)["model_id"])

    def load(self, path, optimizer):
        """A new model from saved weights."""
        body = {"session_id": self.session, "model_seq_id": self.models, "path": path}
        self.models += 1
        answer = self.call("load_weights", {**body, "optimizer": optimizer})
        return TrainedModel(self, answer["model_id"])

    def sampler(self, path=None):
        body = {"session_id": self.session, "sampling_session_seq_id": 1000 + self.models}
        self.models += 1
        body |= {"base_model": "toy"} if path is None else {"model_path": path}
        return self.post("create_sampling_session", body)["sampling_session_id"]

    def sample(self, sampler, tokens, number=0, count=1, **params):
        """Samples that continue tokens; ``params`` with names of requests are those of the request."""
        names = ("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs")
        options = {name: params.pop(name) for name in names if name in params}
        body = {
            "num_samples": count,
            "prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
            "sampling_params": {"temperature": 1.0, "top_k": -1, "top_p": 1.0, **params},
            "sampling_session_id": sampler,
            "seq_id": number,
            "type": "sample",
        }
        return self.call("asample", {**body, **options})


class TrainedModel:
    """Requests to one model, numbered as the client does it."""

    def __init__(self, client, model_id):
        self.client = client
        self.id = model_id
        self.number = 0

    def send(self, path, body):
        self.number += 1
        body = {**body, "model_id": self.id, "seq_id": self.number}
        return self.client.post(path, body)

    def call(self, path, body):
        return self.client.wait(self.send(path, body))

    def send_data(self, data, loss="cross_entropy", **config):
        body = {"data": data, "loss_fn": loss}
        if config:
            body["loss_fn_config"] = config
        return self.send("forward_backward", {"forward_backward_input": body})

    def forward_backward(self, data, loss="cross_entropy", **config):
        """Log-probabilities of each datum."""
        result = self.client.wait(self.send_data(data, loss, **config))
        return [output["logprobs"]["data"] for output in result["loss_fn_outputs"]]

    def forward(self, data):
        body = {"forward_input": {"data": data, "loss_fn": "cross_entropy"}}
        result = self.call("forward", body)
        return [output["logprobs"]["data"] for output in result["loss_fn_outputs"]]

    def step(self, **params):
        body = {"adam_params": {"learning_rate": 1e-2, "eps": 1e-2, **params}}
        return self.call("optim_step", body)["metrics"]["grad_norm"]

    def save(self, name, **options):
        return self.call("save_weights", {"path": name, **options})["path"]

    def save_for_sampler(self, name):
        return self.call("save_weights_for_sampler", {"path": name})["path"]


def tensor(values, dtype="float32"):
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


def datum(tokens, **inputs):
    """A datum that predicts each next token of ``tokens``."""
    targets = {"target_tokens": tensor(tokens[1:], "int64")}
    return {
        "model_input": {"chunks": [{"tokens": tokens[:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": targets | {name: tensor(values) for name, values in inputs.items()},
    }
