# SPDX-License-Identifier: Apache-2.0
"""A server of S3 on this machine (moto's), whose requests can fail in the ways of a network."""

import os
import socket
import sys
import threading
from contextlib import contextmanager
from importlib.util import find_spec

from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/storage"  # where scripts/extra.sh installs it
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))
MISSING = find_spec("s3fs") is None or find_spec("moto") is None
REASON = "no s3fs and moto: run scripts/extra.sh storage"
NAME = "models"


class Server:
    """moto behind a door that can fail.

    Attributes:
        requests: Method and path of each request so far.
        fault: Called with method and path of a request: what to do to it, or None.
    """

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *arguments):
                pass

        self.requests, self.fault = [], lambda method, path: None
        self.released = threading.Event()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._serve, threaded=True, request_handler=Quiet
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def environment(self, cache):
        """Variables of a process that uses the server, on a machine with the folder ``cache``."""
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "MEGATRON_BRIDGE_CACHE": str(cache),
        }

    def close(self):
        self.released.set()
        self._server.shutdown()
        self._thread.join()

    def _serve(self, environ, start):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        found = self.fault(method, path)
        return self._app(environ, start) if found is None else found(self, environ, start)

    def app(self, environ, start):
        return self._app(environ, start)


def fails(server, environ, start):
    """An error of the server."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start("500 Internal Server Error", [("Content-Length", "0")])
    return [b""]


def drops(server, environ, start):
    """A connection that ends in the middle of the answer, or of what is sent."""
    if environ["REQUEST_METHOD"] == "GET":
        body = b"".join(server.app(environ, start))
        return _until(body[: len(body) // 2], lambda: _hang_up(environ))
    return _hang_up(environ)


def _hang_up(environ):
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


def stalls(server, environ, start):
    """An answer that stops after its first half, until the server is closed."""
    body = b"".join(server.app(environ, start))
    return _until(body[: len(body) // 2], lambda: server.released.wait() and _hang_up(environ))


def _until(first, then):
    yield first
    then()


@contextmanager
def variables(environment):
    """Set variables of this process inside."""
    from s3fs import S3FileSystem

    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    S3FileSystem.clear_instance_cache()  # they hold what they read from the environment
    S3FileSystem.read_timeout = 2  # seconds; an answer that stalls longer is asked for again
    try:
        yield
    finally:
        S3FileSystem.clear_instance_cache()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def inside(environment, function, *arguments, **options):
    """Call a function in a worker with these variables."""
    with variables(environment):
        return function(*arguments, **options)


@contextmanager
def serving():
    server = Server()
    try:
        yield server
    finally:
        server.close()
