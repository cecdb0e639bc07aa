# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: what a collector, written with OpenTelemetry's own messages, receives from a run and from a server."""

import asyncio
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec

import pytest

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import CheckpointConfig, LoggerConfig, ValidationConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.telemetry import RequestSpans, Telemetry
from tests.refusals import refused
from tests.toy_run import toy_config
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/otel"  # where scripts/extra.sh installs it
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))
needs_sdk = pytest.mark.skipif(
    find_spec("opentelemetry") is None,
    reason="OpenTelemetry is not installed: run scripts/extra.sh otel",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch):
    """A collector on this machine: spans and data points that were sent to it."""
    spans, points, resources = [], {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            read = _spans if self.path == "/v1/traces" else _points
            read(body, spans if self.path == "/v1/traces" else points, resources)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans, points, resources
    server.shutdown()
    server.server_close()


def _spans(body, spans, resources):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resources.append({item.key: item.value.string_value for item in group.resource.attributes})
        for scope in group.scope_spans:
            spans.extend(scope.spans)


def _points(body, points, resources):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for scope in group.scope_metrics:
            for metric in scope.metrics:
                data = metric.gauge if metric.HasField("gauge") else metric.histogram
                points.setdefault(metric.name, []).extend(data.data_points)


def attributes_of(item):
    return {
        entry.key: entry.value.string_value or entry.value.int_value for entry in item.attributes
    }


def config_of(folder, **train):
    return toy_config(
        train={"train_iters": 2, **train},
        checkpoint=CheckpointConfig(save=str(folder)),
        logger=LoggerConfig(log_interval=1, otel_service_name="toy"),
        validation=ValidationConfig(eval_interval=1, eval_iters=1),
    )


@needs_sdk
def test_a_run_is_a_trace_and_its_metrics_are_those_of_the_log(collector, tmp_path, run_in_process):
    spans, points, resources = collector
    pretrain(config_of(tmp_path), forward_step)
    assert resources[0]["service.name"] == "toy"
    (run,) = (span for span in spans if span.name == "run")
    parts = [span for span in spans if span.name != "run"]
    assert {span.trace_id for span in spans} == {run.trace_id}
    assert {span.parent_span_id for span in parts} == {run.span_id}
    found = sorted((span.name, attributes_of(span)["megatron_bridge.step"]) for span in parts)
    assert found == [
        ("evaluation", 1),
        ("evaluation", 2),
        ("test", 2),
        ("train step", 1),
        ("train step", 2),
    ]
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in spans)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = {line["kind"]: line for line in lines}
    losses = {
        attributes_of(point)["kind"]: point.as_double for point in points["megatron_bridge.loss"]
    }
    assert losses == {kind: last[kind]["lm loss"] for kind in ("train", "validation", "test")}
    (rate,) = points["megatron_bridge.tokens_per_second"]
    assert rate.as_double == last["train"]["tokens per second"]


class Fails(Callback):
    def on_grads_ready(self, context):
        raise RuntimeError("broken card")


@needs_sdk
def test_an_error_ends_the_trace(collector, tmp_path, run_in_process):
    spans, _, _ = collector
    with pytest.raises(RuntimeError, match="broken card"):
        pretrain(config_of(tmp_path), forward_step, [Fails()])
    by_name = {span.name: span for span in spans}
    for name in ("run", "train step"):
        assert by_name[name].status.message == "broken card"
        assert by_name[name].events[0].name == "exception"


@needs_sdk
def test_a_request_continues_the_trace_of_its_client(collector):
    spans, points, _ = collector

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 429, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask():
        headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        sent = []

        async def send(message):
            sent.append(message["type"])

        await middleware(scope, None, send)
        return sent

    telemetry = Telemetry("server", "--otel-service-name server", {}, is_setting=False)
    middleware = RequestSpans(app, telemetry)
    assert asyncio.run(ask()) == ["http.response.start", "http.response.body"]
    telemetry.close()
    (span,) = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "POST /v1/completions"
    assert attributes_of(span)["http.response.status_code"] == 429
    (point,) = points["http.server.request.duration"]
    assert point.count == 1
    assert attributes_of(point)["url.path"] == "/v1/completions"


def test_nothing_is_imported_unless_it_is_used():
    code = (
        "import sys; from megatron.bridge.training import pretrain; from megatron.bridge.cli import serve;"
        "from megatron.bridge.utils import telemetry;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(find_spec("opentelemetry") is not None, reason="OpenTelemetry is installed")
def test_a_missing_package_is_named(tmp_path):
    with refused("logger.otel_service_name=toy", "opentelemetry", "hf-megatron-bridge[otel]"):
        config_of(tmp_path).resolve()
