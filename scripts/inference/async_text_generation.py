# SPDX-License-Identifier: Apache-2.0
"""Continue prompts concurrently, with the options of the Megatron Bridge API: each is written when it is complete.

``python async_text_generation.py --hf_model_path ID [--megatron_model_path DIR] --prompt TEXT --prompt TEXT``
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.script_options import script_engine, script_model
from megatron.bridge.inference import llm
from megatron.bridge.inference.server.engine_client import EngineClient, EngineGoneError
from megatron.bridge.inference.workers import Workers
from megatron.bridge.utils.errors import UserError

sys.path.append(str(Path(__file__).parent))
import text_generation

GAINS = ("tokens", "logprobs", "prompt_logprobs")


async def complete(client: EngineClient, ids: list[int], sampling: Any) -> Any:
    """The text, tokens and log-probabilities of one prompt."""
    found: Any = SimpleNamespace(text="", tokens=[], logprobs=[], prompt_logprobs=[])
    stream = client.submit(ids, sampling)
    await stream.accepted()
    async for progress in stream.progress():
        found.text += progress.piece
        for name in GAINS:
            getattr(found, name).extend(getattr(progress, name))
    return found


async def complete_all(workers: Workers, prompts: list[str], sampling: Any) -> None:
    """Write a JSON object for each prompt, those that are complete first."""
    ((reader, *_),) = workers.iterate("yield_facts", ())
    if reader.hf is None:
        raise UserError("the model has no tokenizer: give --hf_model_path")
    client = EngineClient(workers, len(prompts), lambda reason: None)

    async def write(index: int, prompt: str) -> None:
        found = await complete(client, reader.hf.encode(prompt), sampling)
        record = {"index": index, **text_generation.record_of(prompt, found, sampling)}
        sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")

    await asyncio.gather(*(write(index, prompt) for index, prompt in enumerate(prompts)))


def main(argv: Sequence[str]) -> int:
    """Load the model in processes of its own and ask for all prompts at once."""
    args = text_generation.parsed(argv, __doc__)
    prompts, sampling = text_generation.prompts_of(args), text_generation.sampling_of(args)
    path, options = script_model(args)
    options |= script_engine(args)
    with Workers(llm.ranks_of(options), llm.LLM, path, options) as workers:
        try:
            asyncio.run(complete_all(workers, prompts, sampling))
        except EngineGoneError as error:
            raise UserError(f"the engine has ended: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
