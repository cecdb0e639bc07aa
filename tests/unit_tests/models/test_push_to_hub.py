# SPDX-License-Identifier: Apache-2.0
"""Uploading a model, to an endpoint on this machine that speaks as much of the hub's protocol as is needed."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import huggingface_hub
import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama


class Hub(BaseHTTPRequestHandler):
    """Takes every file inline; keeps what it is given; refuses ``owner/refused``."""

    files: ClassVar[dict[str, bytes]] = {}
    summary = ""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            name = json.loads(body)["name"]
            self.answer(
                {"url": f"{self.server.url}/owner/{name}"}, 401 if name == "refused" else 200
            )
        elif self.path == "/api/validate-yaml":
            content = json.loads(body)["content"]
            self.answer(
                {
                    "errors": [] if "license: apache-2.0" in content else ["no licence"],
                    "warnings": [],
                }
            )
        elif "/preupload/" in self.path:
            wanted = [entry["path"] for entry in json.loads(body)["files"]]
            self.answer(
                {
                    "files": [
                        {"path": path, "uploadMode": "regular", "shouldIgnore": False}
                        for path in wanted
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "header":
                    type(self).summary = line["value"]["summary"]
            address = f"{self.server.url}/owner/model/commit/1"
            self.answer({"commitUrl": address, "commitOid": "1" * 40, "success": True})
        else:
            self.answer({"error": f"not expected: {self.path}"}, 500)

    def do_GET(self):
        self.answer(
            {"id": "owner/model", "siblings": [], "sha": "0" * 40},
            401 if "refused" in self.path else 200,
        )

    def answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    Hub.files.clear()
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", False
    )  # this hub can be reached
    threading.Thread(target=server.serve_forever, daemon=True).start()
    real = huggingface_hub.HfApi
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda token: real(endpoint=server.url, token=token or "t")
    )
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "model"
    directory.mkdir()
    make_llama(directory, num_hidden_layers=1)
    return directory


def test_every_file_arrives(hub, model):
    bridge = AutoBridge.from_hf_pretrained(model)
    address = bridge.push_to_hub(model, "owner/model", commit_message="trained on plays")
    assert address == f"{hub.url}/owner/model"
    assert Hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert "README.md" in Hub.files
    assert Hub.summary == "trained on plays"


def test_a_refusal_is_one_sentence(hub, model):
    with pytest.raises(
        UserError, match=r"the hub does not take owner/refused: .*401.*hf auth login"
    ):
        AutoBridge.from_hf_pretrained(model).push_to_hub(model, "owner/refused")


@pytest.mark.parametrize(
    ("files", "reason"), [((), "has no config.json"), (("config.json",), "has no weights to push")]
)
def test_only_whole_models_are_pushed(hub, model, tmp_path, files, reason):
    for name in files:
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with pytest.raises(UserError, match=reason):
        AutoBridge.from_hf_pretrained(model).push_to_hub(tmp_path, "owner/model")


def test_a_name_that_the_hub_cannot_have(hub, model):
    with pytest.raises(UserError, match="is not a name on the hub"):
        AutoBridge.from_hf_pretrained(model).push_to_hub(model, "a/b/c")
