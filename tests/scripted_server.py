# SPDX-License-Identifier: Apache-2.0
"""The server's endpoints over a scripted engine: each request is answered with the next text of a list."""

import asyncio
import sys
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec

from megatron.bridge.utils.errors import UserError
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/serve"  # where scripts/extra.sh installs it
if BESIDE.is_dir() and str(BESIDE) not in sys.path:
    sys.path.append(str(BESIDE))

HAS_SERVER = find_spec("uvicorn") is not None and find_spec("openai") is not None


class ScriptedEngine:
    """Answers like ``EngineClient``, token by token, with the given texts in order."""

    def __init__(self, hf, texts, ends=True):
        self.hf, self.texts, self.ends = hf, list(texts), ends
        self.submitted = []  # prompts and samplings, as the engine gets them
        self.forgotten = []  # numbers of the requests that were dropped before their end

    def submit(self, prompt, sampling):
        from megatron.bridge.inference.engine import Detokenizer
        from megatron.bridge.inference.server.engine_client import RequestStream
        from megatron.bridge.inference.server.engine_loop import Accepted, ChoiceProgress

        stream = RequestStream(self, len(self.submitted), sampling.n)
        self.submitted.append((self.hf.decode(prompt), sampling))
        stream.put(Accepted(stream.id))
        for choice in range(sampling.n):
            detokenizer = Detokenizer(self.hf, sampling.stop, sampling.shown_ids)
            tokens = self.hf.encode(self.texts.pop(0), add_special_tokens=False)
            for token in tokens[: sampling.max_new_tokens]:
                piece = detokenizer.add(token)
                offsets = detokenizer.offsets[-1:]
                stream.put(ChoiceProgress(stream.id, choice, piece, [token], text_offsets=offsets))
            reason = "stop" if len(tokens) < sampling.max_new_tokens else "length"
            last = ChoiceProgress(stream.id, choice, detokenizer.finish(), [], finish_reason=reason)
            if self.ends:
                stream.put(last)
        return stream

    def forget(self, stream):
        if stream.open_choices:
            self.forgotten.append(stream.id)


class LocalEngine:
    """Answers like ``EngineClient``, with an engine in this process that computes one request at a time."""

    def __init__(self, engine, adapter_changes=None):
        from megatron.bridge.inference.server.engine_loop import EngineLoop

        self.loop = EngineLoop(engine, adapter_changes)

    def submit(self, prompt, sampling):
        from megatron.bridge.inference.server.engine_client import RequestStream
        from megatron.bridge.inference.server.engine_loop import Submit

        stream = RequestStream(self, 0, sampling.n)
        for event in self.loop.apply([Submit(0, prompt, sampling)]):
            stream.put(event)
        while self.loop.is_busy:
            for event in self.loop.step():
                stream.put(event)
        return stream

    def forget(self, stream):
        pass

    async def load_adapter(self, name, path):
        from megatron.bridge.inference.server.engine_loop import LoadAdapter

        self._change(LoadAdapter(0, name, path))

    async def unload_adapter(self, name):
        from megatron.bridge.inference.server.engine_loop import UnloadAdapter

        self._change(UnloadAdapter(0, name))

    def _change(self, command):
        from megatron.bridge.inference.server.engine_loop import RefusedRequest

        (event,) = self.loop.apply([command])
        if isinstance(event, RefusedRequest):
            raise UserError(event.message)


@contextmanager
def scripted_server(
    hf,
    texts,
    tool_parser=None,
    key=None,
    context=1 << 16,
    seconds=30.0,
    ends=True,
    engine=None,
    adapter_root=None,
):
    """Serve the texts, or what ``engine`` computes; yields OpenAI's client and the engine."""
    import uvicorn
    from openai import OpenAI

    from megatron.bridge.inference.prompts import PromptReader
    from megatron.bridge.inference.server.adapter_endpoints import add_adapter_endpoints
    from megatron.bridge.inference.server.app import Server, make_app
    from megatron.bridge.inference.server.engine_loop import Load
    from megatron.bridge.inference.server.metrics import Metrics
    from megatron.bridge.inference.server.planner import RequestPlanner
    from megatron.bridge.inference.server.run import Guard, GuardConfig, drop_note_of_uvicorn

    reader = PromptReader(hf, max_context=context)
    planner = RequestPlanner("toy", reader, context, tool_parser=tool_parser)
    server = Server(planner, 60.0, 0)
    server.client = engine = engine or ScriptedEngine(hf, texts, ends)
    server.metrics = Metrics("toy", Load)
    server.is_ready = True
    drop_note_of_uvicorn()
    app = make_app(server)
    add_adapter_endpoints(app, server, adapter_root)
    config = uvicorn.Config(
        Guard(app, GuardConfig(key, seconds=seconds)),
        port=0,
        log_config=None,  # configuring closes absl's handler, and with it the stream that pytest captures
        log_level="error",
        lifespan="off",
    )
    process = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(process.serve()))
    thread.start()
    try:
        while not process.started:
            time.sleep(0.01)
        port = process.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}/v1"
        yield OpenAI(base_url=address, api_key=key or "none", max_retries=0, timeout=60), engine
    finally:
        process.should_exit = True
        thread.join()
