# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""OpenTelemetry: spans and metrics of a process, sent over OTLP. Nothing is imported unless it is turned on.

The environment variables of OpenTelemetry, such as ``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_RESOURCE_ATTRIBUTES``,
say where they are sent and what else describes the process.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron.bridge.utils.optional_imports import import_optional
from megatron.bridge.version import __version__

EXTRA = "otel"
SCOPE = "megatron.bridge"
Attributes = Mapping[str, str | int | float | bool]


class Telemetry:
    """Spans and metrics of one process.

    Args:
        service: Name of the service that the process belongs to.
        key: The setting or command that turns it on, for messages.
        attributes: What else describes the process.
        is_setting: Whether ``key`` is a setting.
    """

    def __init__(
        self, service: str, key: str, attributes: Attributes, is_setting: bool = True
    ) -> None:
        def load(module: str) -> Any:
            return import_optional(f"opentelemetry.{module}", key, EXTRA, is_setting)

        self._trace = load("trace")
        self._propagate = load("propagate")
        sdk_metrics = load("sdk.metrics")
        export = load("sdk.metrics.export")
        span_exporter = load("exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        metric_exporter = load("exporter.otlp.proto.http.metric_exporter").OTLPMetricExporter()
        described = {"service.name": service, "service.version": __version__, **attributes}
        resource = load("sdk.resources").Resource.create(described)
        self._tracers = load("sdk.trace").TracerProvider(resource=resource)
        batches = load("sdk.trace.export").BatchSpanProcessor(span_exporter)
        self._tracers.add_span_processor(batches)
        self._meters = sdk_metrics.MeterProvider(
            [export.PeriodicExportingMetricReader(metric_exporter)], resource=resource
        )
        self._tracer = self._tracers.get_tracer(SCOPE, __version__)
        self._meter = self._meters.get_meter(SCOPE, __version__)
        self._instruments: dict[str, Any] = {}

    def start_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        parent: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Start a span, which its caller ends.

        Args:
            name: What happens meanwhile.
            attributes: Facts about it.
            parent: The span that it is part of; None starts a trace.
            headers: Of a request, which may name the span of the client as the parent.
        """
        context = None if parent is None else self._trace.set_span_in_context(parent)
        if headers is not None:
            context = self._propagate.extract(headers)
        return self._tracer.start_span(name, context=context, attributes=dict(attributes or {}))

    def fail_span(self, span: Any, error: BaseException) -> None:
        """Mark a span as failed, with the exception."""
        span.record_exception(error)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))

    def set_gauge(self, name: str, value: float, attributes: Attributes, meaning: str = "") -> None:
        """Set the last value of a metric."""
        if name not in self._instruments:
            self._instruments[name] = self._meter.create_gauge(name, description=meaning)
        self._instruments[name].set(value, dict(attributes))

    def record_seconds(self, name: str, seconds: float, attributes: Attributes) -> None:
        """Add a duration to the histogram ``name``."""
        if name not in self._instruments:
            self._instruments[name] = self._meter.create_histogram(name, unit="s")
        self._instruments[name].record(seconds, dict(attributes))

    def close(self) -> None:
        """Send what is left."""
        self._tracers.shutdown()
        self._meters.shutdown()


class RequestSpans:
    """ASGI middleware: a span for each HTTP request, part of the client's trace, and its duration as a metric."""

    def __init__(self, app: Any, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Any, receive: Any, send: Callable[..., Awaitable[Any]]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        known: dict[str, Any] = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = self._telemetry.start_span(
            f"{scope['method']} {scope['path']}", known, headers=headers
        )

        async def note_status(message: Any) -> None:
            if message["type"] == "http.response.start":
                known["http.response.status_code"] = message["status"]
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except BaseException as error:
            self._telemetry.fail_span(span, error)
            raise
        finally:
            span.end()
            seconds = time.perf_counter() - started
            self._telemetry.record_seconds("http.server.request.duration", seconds, known)
