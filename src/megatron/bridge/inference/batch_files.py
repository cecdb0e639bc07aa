# SPDX-License-Identifier: Apache-2.0
"""OpenAI's batch files: a request of the API in each line, and a line with its answer.

A line that is no request, or that cannot be answered, gets a line with its error; the other lines go on.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.bridge.data.records.jsonl import open_data, parse_record
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.prompt_files import LineMark, ResumableFile, digest_of
from megatron.bridge.inference.requests import Completion, encode_experts
from megatron.bridge.inference.server.answers import Choice, Json
from megatron.bridge.inference.server.errors import ApiError, check_finish_reason, refusal_of
from megatron.bridge.inference.server.planner import RequestPlan, RequestPlanner
from megatron.bridge.inference.server.responses import ResponsesRequest, ResponseWriter
from megatron.bridge.inference.server.schemas import (
    ChatRequest,
    CompletionRequest,
    refusal_of_fields,
)
from megatron.bridge.utils.errors import UserError, did_you_mean

Body = ChatRequest | CompletionRequest | ResponsesRequest
ENDPOINTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
"""The model of the body for each ``url`` of a line."""
_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchLine:
    """A line of a batch file.

    Attributes:
        custom_id: The user's name of the line; None if the line has none.
        mark: What its output line says.
        url: Endpoint of the request.
        body: Body of the request.
        problem: Why the line is no request; None if it is one.
    """

    custom_id: str | None
    mark: LineMark
    url: str = ""
    body: Any = None
    problem: str | None = None


def is_batch_file(path: Path) -> bool:
    """Return whether the first line of a file is a request in the form of OpenAI's batch files."""
    if path.suffix != ".jsonl":
        return False
    with open_data(path) as file:
        for raw in file:
            if raw.strip():
                try:
                    record = json.loads(raw)
                except ValueError:
                    return False
                return isinstance(record, dict) and {"custom_id", "body"} <= record.keys()
    return False


def read_batch(path: Path, settings: str) -> list[BatchLine]:
    """Read all lines of a batch file.

    Args:
        path: The file.
        settings: What decides the answers besides the lines, such as the model.
    """
    lines: list[BatchLine] = []
    known_ids: set[str] = set()
    with open_data(path) as file:
        for line_number, raw in enumerate(file, start=1):
            if raw.strip():
                line = _read_line(raw, f"{path}:{line_number}", settings, known_ids)
                lines.append(line)
                if line.custom_id is not None:
                    known_ids.add(line.custom_id)
    return lines


def _read_line(raw: bytes, location: str, settings: str, known_ids: set[str]) -> BatchLine:
    text = raw.decode("utf-8", "replace").strip()
    digest = digest_of([text, location.rpartition(":")[2], settings])
    record: Mapping[str, Any] = {}
    try:
        record = parse_record(raw, location)
        problem = next(_find_problems(record, known_ids), None)
    except UserError as error:
        problem = str(error)
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str):
        custom_id = None
    mark = LineMark(custom_id, digest)
    if problem is not None:
        return BatchLine(custom_id, mark, problem=problem)
    return BatchLine(custom_id, mark, record["url"], record["body"])


def _find_problems(record: Mapping[str, Any], known_ids: set[str]) -> Iterator[str]:
    """Yield the reasons why a line is no request."""
    for key in _KEYS:
        if key not in record:
            yield f"{key} is missing: a line has {', '.join(_KEYS)}"
    for key in record:
        if key not in _KEYS:
            yield f"{key} is not a key of a line{did_you_mean(key, _KEYS)}"
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        yield f"custom_id={custom_id!r} must be a text"
    if custom_id in known_ids:
        yield f"custom_id={custom_id!r} is that of an earlier line: ids must differ"
    if record.get("method") != "POST":
        yield f"method={record.get('method')!r} must be POST"
    if record.get("url") not in ENDPOINTS:
        yield f"url={record.get('url')!r} must be one of {', '.join(ENDPOINTS)}"
    if not isinstance(record.get("body"), dict):
        yield "body must be an object"


class BatchAnswers(ResumableFile):
    """The answers to the lines of a batch file, written after those that an interrupted command left.

    Args:
        path: File to create or to continue.
        lines: All lines of the batch file.
    """

    def __init__(self, path: Path, lines: Sequence[BatchLine]) -> None:
        super().__init__(path, [line.mark for line in lines], _read_mark)


def _read_mark(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record.get("custom_id"), str(record.get("id")).removeprefix(_ID_PREFIX)


_ID_PREFIX = "batch_req_"


def answer_lines(
    llm: LLM, planner: RequestPlanner, lines: Sequence[BatchLine]
) -> Iterator[dict[str, Any]]:
    """Yield the output line of each line, in order, as soon as it is complete."""
    requests = [_plan_line(planner, line) for line in lines]
    plans = [request.plan for request in requests if isinstance(request, _PlannedRequest)]
    prompts = [prompt for plan in plans for prompt in plan.prompts]
    samplings = [plan.sampling for plan in plans for _ in plan.prompts]
    answers = llm.complete_each(prompts, samplings)
    for line, request in zip(lines, requests, strict=True):
        if request is None:
            yield _write_line(line, error={"code": "invalid_request", "message": line.problem})
            continue
        if isinstance(request, ApiError):
            yield _write_line(line, request.status, request.body)
            continue
        completions = list(itertools.islice(answers, len(request.plan.prompts)))
        try:
            yield _write_line(line, 200, request.write_body(completions))
        except ApiError as error:
            yield _write_line(line, error.status, error.body)


@dataclass(frozen=True)
class _PlannedRequest:
    body: Body
    plan: RequestPlan

    def write_body(self, answers: Sequence[list[Completion] | str]) -> Json:
        """Return the body of the answer.

        Args:
            answers: The completions of each prompt, or why the engine refuses it.

        Raises:
            ApiError: A prompt is refused, or a completion has failed.
        """
        completions: list[Completion] = []
        for answer in answers:
            if isinstance(answer, str):
                raise ApiError(400, answer)
            completions += answer
        choices = self.plan.make_choices()
        for choice, completion in zip(choices, completions, strict=True):
            check_finish_reason(completion.finish_reason)
            _fill_choice(choice, completion)
        answer = self.plan.write_answer(choices)
        if not isinstance(self.body, ResponsesRequest):
            return answer
        return ResponseWriter(self.body, self.plan.model).write_whole(answer)


def _fill_choice(choice: Choice, completion: Completion) -> None:
    choice.text = completion.text
    choice.tokens = len(completion.tokens)
    choice.logprobs = completion.logprobs[: completion.visible_tokens]
    choice.prompt_logprobs = completion.prompt_logprobs
    choice.finish_reason = completion.finish_reason
    choice.text_offsets = completion.text_offsets
    choice.cached_tokens = completion.cached_tokens
    if completion.routed_experts is not None:
        choice.routed_experts = encode_experts(completion.routed_experts)


def _plan_line(planner: RequestPlanner, line: BatchLine) -> _PlannedRequest | ApiError | None:
    """Return what to compute for a line, or the error of its request; None if it is no request."""
    if line.problem is not None:
        return None
    kind = ENDPOINTS[line.url]
    try:
        body = kind.model_validate(line.body)
    except ValidationError as error:
        return refusal_of_fields(error.errors(), kind.model_fields)
    if body.stream:
        return ApiError(400, "stream: a batch has no streams: leave it out", "stream")
    try:
        if isinstance(body, CompletionRequest):
            plan = planner.plan_completion(body)
        elif isinstance(body, ChatRequest):
            plan = planner.plan_chat(body)
        else:
            plan = planner.plan_response(body)
    except (ApiError, UserError) as error:
        return refusal_of(error)
    return _PlannedRequest(body, plan)


def _write_line(
    line: BatchLine, status: int = 0, body: Json | None = None, error: Json | None = None
) -> dict[str, Any]:
    """Return an output line, with either the ``body`` of a response or an ``error``."""
    digest = line.mark.digest
    response = None
    if error is None:
        response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {
        "id": f"{_ID_PREFIX}{digest}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
