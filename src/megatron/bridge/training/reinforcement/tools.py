# SPDX-License-Identifier: Apache-2.0
"""Functions of the user that a model calls in its completions."""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.utils.errors import UserError, one_line
from megatron.bridge.utils.user_functions import NamedFunction, load_functions

KEY = "grpo.tools"


@dataclass(frozen=True)
class ToolResult:
    """What a call gave back, as the model reads it."""

    text: str
    failed: bool


class Toolbox:
    """The tools of a run, with the JSON schemas that prompts show.

    Args:
        functions: The tools.

    Raises:
        UserError: A function has no type hints, or no docstring that describes its arguments.
    """

    def __init__(self, functions: Sequence[NamedFunction]) -> None:
        self._functions = {entry.name: entry.function for entry in functions}
        self.schemas = [_describe(entry) for entry in functions]
        """JSON schemas in OpenAI's form."""

    def __len__(self) -> int:
        return len(self._functions)

    def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool. Whatever goes wrong is told to the model, which may do better.

        Args:
            name: The function that the model asks for.
            arguments: Its arguments as a JSON object, as the model wrote them.
        """
        if name not in self._functions:
            return _failure(f"there is no tool {name}; the tools are {', '.join(self._functions)}")
        try:
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                return _failure("the arguments are not a JSON object")
            result = self._functions[name](**values)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
        except Exception as error:
            return _failure(f"{type(error).__name__}: {one_line(error)}")
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return ToolResult(text, failed=False)


def load_tools(
    settings: GRPOConfig, functions_of_script: Sequence[Callable[..., Any]] = ()
) -> Toolbox:
    """Import the functions of ``grpo.tools``, which runs their code; without any, the box is empty.

    Args:
        settings: The names.
        functions_of_script: Tools in addition to those with a name.

    Raises:
        UserError: A name leads to no function, a function does not describe its arguments, or the run asks for the
            engine's numbers.
    """
    toolbox = Toolbox(load_functions(KEY, [*settings.tools, *functions_of_script]))
    if toolbox and settings.exact_rollout:
        raise UserError(
            f"{KEY} does not work with grpo.exact_rollout=True: the engine reads results of tools with other "
            "numbers than it writes answers, set exact_rollout=False"
        )
    return toolbox


def offer_tools(config: ConfigContainer, toolbox: Toolbox) -> None:
    """Show the tools in every prompt of a resolved config."""
    prompts: Any = config.dataset
    prompts.tools = toolbox.schemas or None


def _describe(entry: NamedFunction) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(entry.function)
    except Exception as error:
        raise UserError(
            f"{KEY}: {entry.name} cannot be described to the model ({one_line(error)}): give each parameter a type "
            "hint, and a line in the section Args: of the docstring"
        ) from error
    function = schema["function"]
    function["name"] = entry.name  # by which the model calls it
    function.pop("return", None)  # requests to a server, as users send them, do not have it either
    return schema


async def _wait(result: Any) -> Any:
    return await result


def _failure(reason: str) -> ToolResult:
    return ToolResult(json.dumps({"error": reason}), failed=True)
