# SPDX-License-Identifier: Apache-2.0
"""Errors in the format of OpenAI's API."""

import json
from typing import Any

from megatron.bridge.inference.conversations.planning import FieldError
from megatron.bridge.inference.requests import GRAMMAR_FAILED, NOT_FINITE
from megatron.bridge.utils.errors import UserError


class SlowReaderError(Exception):
    """A client has not read a part of the answer in time."""


class ApiError(Exception):
    """An error response: a message for the user, the name of the invalid field, and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def refusal_of(error: ApiError | UserError) -> ApiError:
    """Return the error response for a request that cannot be computed."""
    if isinstance(error, ApiError):
        return error
    return ApiError(400, str(error), error.field if isinstance(error, FieldError) else None)


def check_finish_reason(reason: str | None) -> None:
    """Raise an error response if a completion has failed."""
    if reason == "error":
        raise ApiError(500, NOT_FINITE, code="not_finite")
    if reason == "grammar":
        raise ApiError(400, GRAMMAR_FAILED, code="grammar_failed")


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def to_json(value: Any) -> bytes:
    """Encode JSON in ASCII, which can represent any text of a request."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
