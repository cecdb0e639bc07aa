# SPDX-License-Identifier: Apache-2.0
"""What the engine computes for a request of OpenAI's API, and how its answer is written; without HTTP."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from megatron.bridge.inference.conversations.options import describe
from megatron.bridge.inference.conversations.planning import plan_chat
from megatron.bridge.inference.prompts import PromptReader
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.server.answers import (
    ChatFormat,
    Choice,
    CompletionFormat,
    Format,
    Json,
    TokenTexts,
    usage,
)
from megatron.bridge.inference.server.errors import ApiError
from megatron.bridge.inference.server.responses import ResponsesRequest
from megatron.bridge.inference.server.schemas import ChatRequest, CompletionRequest
from megatron.bridge.utils.errors import did_you_mean

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True)
class RequestPlan:
    """What the engine computes for a request, and the form of the answer.

    Attributes:
        model: Name of the model in the answer.
        format: Form of the endpoint's answers.
        prompts: Token ids of each prompt.
        sampling: Sampling of each prompt.
        echoed: Texts of the prompts if the answer begins with them.
        head: Fields with which the answer and its chunks begin.
    """

    model: str
    format: Format
    prompts: list[list[int]]
    sampling: Sampling
    echoed: list[str] | None = None
    head: Json = field(init=False)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.format.kind.startswith("chat") else "cmpl"
        head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.model,
        }
        object.__setattr__(self, "head", head)

    def make_choices(self) -> list[Choice]:
        """Return the choices of the answer, which have no text yet: those of the first prompt first."""
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(self.prompts):
            echoed = self.echoed[prompt_index] if self.echoed else None
            for _ in range(self.sampling.n):
                choices.append(Choice(len(choices), prompt, echoed))
        return choices

    def write_answer(self, choices: Sequence[Choice]) -> Json:
        """Return the answer from its complete choices."""
        per_prompt = self.sampling.n
        for choice in choices:  # the first choice has the prompt's log-probabilities
            first = choices[choice.index - choice.index % per_prompt]
            choice.prompt_logprobs = first.prompt_logprobs
        written = [self.format.whole(choice) for choice in choices]
        return {
            **self.head,
            "object": self.format.kind,
            "choices": written,
            "usage": usage(self.prompts, choices),
        }


@dataclass
class RequestPlanner:
    """Plans the requests to one model.

    Attributes:
        name: Name of the model.
        reader: Converts prompts to tokens.
        max_context: Tokens of a prompt and its completion.
        adapters: Names of adapters, which clients use as names of models.
        tool_parser: Name of the format of calls; None takes the chat template's.
    """

    name: str
    reader: PromptReader
    max_context: int
    adapters: Sequence[str] = ()
    tool_parser: str | None = None
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.reader.hf)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter for a model name, and refuse unknown names."""
        if name is not None:
            check_model_name(name, (self.name, *self.adapters))
        return None if name == self.name else name

    def plan_completion(self, body: CompletionRequest) -> RequestPlan:
        """Return the plan of a request of ``/v1/completions``."""
        adapter = self.adapter_of(body.model)
        _check_ids(body.prompts)
        prompts = [self.reader.tokens(prompt, "prompt") for prompt in body.prompts]
        count = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        for prompt in prompts:
            # a prompt that fills the context can be scored without an answer
            if count or len(prompt) > self.max_context:
                self._check_length(len(prompt), count)
        changes = {
            "max_new_tokens": count,
            "logprobs": body.logprobs,
            "adapter_name": adapter,
            "grammar": body.grammar(),
        }
        echoed = None
        if body.echo:
            echoed = [
                prompt if isinstance(prompt, str) else self.reader.hf.decode(prompt)
                for prompt in body.prompts
            ]
            changes["prompt_logprobs"] = body.logprobs
        return RequestPlan(
            model=adapter or self.name,
            format=CompletionFormat(self.texts, body.logprobs),
            prompts=prompts,
            sampling=body.sampling(**changes),
            echoed=echoed,
        )

    def plan_chat(self, body: ChatRequest) -> RequestPlan:
        """Return the plan of a request of ``/v1/chat/completions``."""
        adapter = self.adapter_of(body.model)
        plan = plan_chat(
            self.reader,
            [message.as_record() for message in body.messages],
            body,
            self.tool_parser,
            continues=bool(body.continue_final_message),
        )
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        limit = self._check_length(len(plan.prompt), getattr(body, name), name)
        top = (body.top_logprobs or 0) if body.logprobs else None
        changes = {"max_new_tokens": limit, "logprobs": top, "adapter_name": adapter}
        return RequestPlan(
            model=adapter or self.name,
            format=ChatFormat(self.texts, top, plan.answer_format),
            prompts=[plan.prompt],
            sampling=body.sampling(**changes, **plan.changes),
        )

    def plan_response(self, body: ResponsesRequest) -> RequestPlan:
        """Return the plan of a request of ``/v1/responses``, which is that of a chat."""
        try:
            chat_request = body.as_chat()
        except ValidationError as error:
            raise ApiError(400, describe(error.errors()[0], ())[0], "input") from error
        return self.plan_chat(chat_request)

    def _check_length(self, tokens: int, limit: int | None = None, name: str = "max_tokens") -> int:
        """Return the number of tokens that may follow a prompt.

        Args:
            tokens: Tokens of the prompt.
            limit: Tokens that the client asks for at most; None asks for as many as fit.
            name: The field with the limit.

        Raises:
            ApiError: The prompt alone or with the answer exceeds the context.
        """
        free_tokens = self.max_context - tokens
        if free_tokens < 1:
            message = f"the prompt has {tokens} tokens, more than the context of {self.max_context} allows: shorten it"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
        if limit is not None and limit > free_tokens:
            message = (
                f"a prompt of {tokens} tokens and {name}={limit} exceed the context of {self.max_context}: shorten the "
                f"prompt, or lower {name}"
            )
            raise ApiError(400, message, name, "context_length_exceeded")
        return free_tokens if limit is None else limit


def check_model_name(name: str, served: Sequence[str]) -> None:
    """Refuse the name of a model that is not served."""
    if name not in served:
        message = f"model {name!r:.100} is not served here{did_you_mean(name, served)}: use {' or '.join(served)}"
        raise ApiError(404, message, "model", "model_not_found")


def _check_ids(prompts: Sequence[str | list[int]]) -> None:
    """Refuse numbers that no tokenizer can decode; the engine checks the vocabulary."""
    for token in (token for prompt in prompts if isinstance(prompt, list) for token in prompt):
        if not 0 <= token < 1 << 31:
            raise ApiError(
                400,
                f"prompt: token {token} is not in the vocabulary: use the model's tokenizer",
                "prompt",
            )
