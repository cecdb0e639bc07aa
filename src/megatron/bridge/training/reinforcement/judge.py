# SPDX-License-Identifier: Apache-2.0
"""A language model behind an OpenAI-compatible server as a reward function."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.bridge.training.config.blocks.reinforcement import JudgeConfig
from megatron.bridge.training.reinforcement.http_session import open_session
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, one_line

KEY = "grpo.judge"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FIRST_PAUSE_SECONDS = 1.0


class Judge:
    """Asks a judge for a number for each completion; a reward is that number divided by ``highest_score``.

    Args:
        settings: The server, the model and the question.
    """

    __name__ = "judge"

    def __init__(self, settings: JudgeConfig) -> None:
        if not settings.base_url or not settings.model:
            raise UserError(
                f"{KEY} needs base_url, such as http://localhost:8000/v1, and model, its name on that server; they "
                f"are {settings.base_url!r} and {settings.model!r}"
            )
        if "{completion}" not in settings.question:
            raise UserError(f"{KEY}.question has no {{completion}}, so the judge would not see it")
        self._settings = settings
        self._session = open_session(
            settings.concurrency,
            settings.api_key_variable,
            settings.retries,  # a question changes nothing, so it may be asked twice
            FIRST_PAUSE_SECONDS,
        )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """Rewards of completions, None where the reply has no number.

        Raises:
            UserError: The server fails, or no reply has a number.
        """
        questions = [
            self._question(
                prompt, completion, {name: values[index] for name, values in columns.items()}
            )
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        with ThreadPoolExecutor(self._settings.concurrency) as threads:
            replies = list(threads.map(self._ask, questions))
        rewards = [self._reward(reply) for reply in replies]
        silent = [reply for reply, reward in zip(replies, rewards, strict=True) if reward is None]
        if len(silent) == len(replies):
            raise UserError(
                f"{KEY}: no reply of {self._settings.model} has a number from 0 to "
                f"{self._settings.highest_score:g}; one is {silent[0]!r:.120}: change {KEY}.question"
            )
        if silent:
            print_rank_0(
                f"note: {len(silent)} of {len(replies)} replies of {KEY} have no number from 0 to "
                f"{self._settings.highest_score:g}, so these completions get no reward of it; one is "
                f"{silent[0]!r:.120}"
            )
        return rewards

    def _question(self, prompt: Any, completion: Any, columns: dict[str, Any]) -> str:
        values = {**columns, "prompt": text_of(prompt), "completion": text_of(completion)}
        try:
            return self._settings.question.format_map(values)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"{KEY}.question cannot be filled in ({type(error).__name__}: {one_line(error)}): it may name "
                f"{', '.join(sorted(values))} in braces, and other braces are doubled"
            ) from error

    def _ask(self, question: str) -> str:
        import requests

        settings = self._settings
        assert settings.base_url is not None, "the constructor refuses others"
        try:
            reply = self._session.post(
                settings.base_url.rstrip("/") + "/chat/completions",
                json={
                    "model": settings.model,
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": settings.max_tokens,
                    "temperature": 0.0,
                },
                timeout=settings.timeout_seconds,
            )
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (requests.RequestException, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{KEY}.base_url={settings.base_url}: the judge {settings.model} fails with "
                f"{type(error).__name__}: {one_line(error)}: check that the server runs and has the model"
            ) from error

    def _reward(self, reply: str) -> float | None:
        """The last number of a reply, which may reason before it."""
        numbers = NUMBER.findall(reply)
        if not numbers:
            return None
        score = float(numbers[-1])
        highest = self._settings.highest_score
        return score / highest if 0 <= score <= highest else None


def text_of(content: Any) -> str:
    """A text, or the messages of a conversation as one text.

    Args:
        content: A text, or a list of messages; a completion of one message is its content.
    """
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0]["role"] == "assistant":
        return str(content[0].get("content") or "")
    return "\n".join(
        f"{message['role']}: {message.get('content') or message.get('tool_calls') or ''}"
        for message in content
    )
