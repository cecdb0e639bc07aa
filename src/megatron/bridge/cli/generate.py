# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge generate``: continue prompts with any checkpoint, under any layout."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import (
    add_model_options,
    add_sampling_options,
    add_tool_parser,
)
from megatron.bridge.cli.support.output_files import OutputFile
from megatron.bridge.cli.support.parser import NamedPaths, Parser
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.inference.prompt_files import PromptLine


DESCRIPTION = (
    "Continue prompts. With --prompts and --output, completions are written one a line, in the order "
    "of the prompts; the same command resumes where a killed one stopped."
)
EXAMPLES = """examples:
  megatron-bridge generate checkpoints/smollm2 --prompt "The capital of France is" --max-new-tokens 20
  megatron-bridge generate HuggingFaceTB/SmolLM2-135M-Instruct --prompts in.jsonl --output out.jsonl --chat

  megatron-bridge generate Qwen/Qwen2-Audio-7B-Instruct --audio call.wav --prompt "Who speaks?"
  megatron-bridge generate Qwen/Qwen2.5-VL-3B-Instruct --image chart.png --prompt "What does it show?"

A line of a .jsonl file is an object with prompt, text or input (a text or token ids) or
messages, with images as in training data and with tools, response_format and so on as in
OpenAI's API; an id; and sampling parameters of its own. A line of another file is a prompt.

OpenAI's batch files (custom_id, method, url and body in each line) are recognized, and answered
as `serve` answers: a line with an error does not end the command.
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_model_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt per line")
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; its completion is printed")
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="image that --prompt asks about; repeatable",
    )
    parser.add_argument(
        "--audio",
        action="append",
        metavar="FILE",
        help="recording that --prompt asks about; repeatable",
    )
    parser.add_argument(
        "--media-root",
        metavar="DIR",
        help="folder of the images and recordings of --prompts (default: its own)",
    )
    parser.add_hidden_names({"--out": "--output"})
    parser.add_argument(
        "--output",
        type=OutputFile,
        metavar="FILE",
        help="JSONL file of completions (default: print them)",
    )
    parser.add_argument("--chat", action="store_true", help="send each text as a user's message")
    add_sampling_options(parser)
    parser.add_argument(
        "--adapters",
        action=NamedPaths,
        metavar="NAME=DIR",
        help="adapter and its name, which selects it as adapter_name in a line; repeatable",
    )
    parser.add_argument(
        "--adapter-name",
        metavar="NAME",
        help="name from --adapters for lines without adapter_name",
    )
    parser.add_argument(
        "--name",
        help="name of the model in a batch file (default: the last part of PATH)",
    )
    add_tool_parser(parser)
    output = parser.add_argument_group("output")
    output.add_argument("-n", type=int, default=1, metavar="N", help="completions of each prompt")
    output.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probabilities of each token and of the K most likely tokens",
    )
    output.add_argument(
        "--prompt-logprobs", type=int, metavar="K", help="the same for the prompt's tokens"
    )
    output.add_argument(
        "--routed-experts",
        action="store_true",
        help="experts of each token, as the base64 text of a .npy file",
    )
    output.add_argument("--ignore-eos", action="store_true", help="continue after end tokens")


def run(args: argparse.Namespace) -> int:
    if args.prompts is None and args.output is not None:
        raise UserError(
            "--output is for --prompts: leave it out, the completion of --prompt is printed"
        )
    if args.media_root and args.prompts is None:
        raise UserError(
            "--media-root is for the images of --prompts: leave it out, --image and --audio take any path"
        )
    if args.image and args.prompts is not None:
        raise UserError("--image is for --prompt: name the images of --prompts in its messages")
    if args.audio and args.prompts is not None:
        raise UserError("--audio is for --prompt: name the recordings of --prompts in its messages")
    if args.prompts is not None and _is_batch_file(args.prompts):
        _refuse_idle_options(args)
        model_options.check_paths(args)
        return _answer_batch(args)
    if args.name:
        raise UserError(f"--name {args.name} is for batch files: leave it out")
    if args.routed_experts and args.prompts is None:
        raise UserError("--routed-experts is for --prompts: --prompt prints only the text")
    sampling = model_options.sampling_values(args)
    model_options.check_paths(args)
    return _print_one(args, sampling) if args.prompts is None else _write_all(args, sampling)


def _is_batch_file(path: Path) -> bool:
    if path.suffix != ".jsonl":  # keeps --help and errors quick
        return False
    from megatron.bridge.inference.batch_files import is_batch_file

    return is_batch_file(path)


_OPTIONS_OF_BODIES = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
    *("stop", "n", "logprobs", "prompt_logprobs", "ignore_eos", "chat", "adapter_name"),
)
"""Options that the body of each request in a batch file has instead."""


def _refuse_idle_options(args: argparse.Namespace) -> None:
    parser = Parser()
    add_arguments(parser)
    for name in _OPTIONS_OF_BODIES:
        if getattr(args, name) != parser.get_default(name):
            option = "-n" if name == "n" else f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option}: each body of the batch file {args.prompts} says it: leave it out"
            )
    if args.media_root:
        raise UserError(
            f"--media-root: the images of the batch file {args.prompts} are inside it: leave it out"
        )


def _answer_batch(args: argparse.Namespace) -> int:
    """Answer the requests of a batch file."""
    from megatron.bridge.checkpoint.collective import on_first_rank
    from megatron.bridge.inference.batch_files import BatchAnswers, answer_lines, read_batch
    from megatron.bridge.inference.server.planner import RequestPlanner
    from megatron.bridge.utils import distributed

    name = args.name or Path(args.model).resolve().name
    lines = read_batch(args.prompts, f"{_settings(args)} {name}")
    if args.output is not None:
        _check_output_folder(args.output)
    with model_options.load(args) as llm:
        adapters = tuple(args.adapters or ())
        planner = RequestPlanner(name, llm.reader, llm.max_context, adapters, args.tool_parser)
        is_first = distributed.rank() == 0
        file = None
        if is_first and args.output is not None:
            file = BatchAnswers(args.output, lines)
        done = on_first_rank(lambda: file.done if file else 0)
        failed = 0
        for record in answer_lines(llm, planner, lines[done:]):
            failed += record["error"] is not None or record["response"]["status_code"] != 200
            if file is not None:
                file.append(record)
            elif is_first:
                sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
                sys.stdout.flush()
    if file is not None:
        file.close()
        resumed = f", {done} of them before" if done else ""
        errors = f", {failed} errors" if failed else ""
        sys.stdout.write(f"{len(lines)} answers: {args.output}{resumed}{errors}\n")
    return 0


def _print_one(args: argparse.Namespace, values: dict[str, Any]) -> int:
    from megatron.bridge.inference.prompts import as_messages
    from megatron.bridge.inference.requests import Sampling
    from megatron.bridge.utils import distributed

    prompt: Any = args.prompt
    if args.chat or args.image or args.audio:
        prompt = as_messages(args.prompt, args.image or (), args.audio or ())
    with model_options.load(args) as llm:
        for completions in llm.generate_each([prompt], Sampling(**values), ["--prompt"]):
            if distributed.rank() == 0:
                for completion in completions:
                    sys.stdout.write(completion.text + "\n")
    return 0


def _settings(args: argparse.Namespace) -> str:
    """Return what decides completions besides the prompts: the checkpoints, their adapters, dtype and template."""
    names = ("model", "adapter", "adapters", "tokenizer", "dtype", "template", "media_root")
    values = {name: str(getattr(args, name, None)) for name in names}
    for name in ("model", "adapter"):
        value = getattr(args, name, None)
        if value is not None and hub.is_megatron(value):
            values[name] = str(paths.resolve(value).resolve())
    if args.tool_parser is not None:
        values["tool_parser"] = args.tool_parser
    return json.dumps(values, sort_keys=True)


def _print_all(args: argparse.Namespace, lines: Sequence["PromptLine"]) -> int:
    """Print what ``--output`` would hold, a line as soon as it is complete."""
    from megatron.bridge.inference.prompt_files import as_record
    from megatron.bridge.utils import distributed

    prompts = [line.prompt for line in lines]
    samplings = [line.sampling for line in lines]
    places = [line.where for line in lines]
    with model_options.load(args, media_root=args.media_root or str(args.prompts.parent)) as llm:
        answers = llm.generate_each(prompts, samplings, places)
        for line, completions in zip(lines, answers, strict=True):
            if distributed.rank() == 0:
                record = json.dumps(as_record(line, completions), ensure_ascii=False)
                sys.stdout.write(record + "\n")
                sys.stdout.flush()
    return 0


def _check_output_folder(output: Path) -> None:
    if not output.parent.is_dir():
        raise UserError(f"--output {output} cannot be written: create its folder first")


def _write_all(args: argparse.Namespace, values: dict[str, Any]) -> int:
    from megatron.bridge.checkpoint.collective import on_first_rank
    from megatron.bridge.inference.prompt_files import CompletionFile, read_prompts
    from megatron.bridge.utils import distributed

    lines = read_prompts(args.prompts, values, args.chat)
    if args.output is None:
        return _print_all(args, lines)
    _check_output_folder(args.output)
    with model_options.load(args, media_root=args.media_root or str(args.prompts.parent)) as llm:
        first = distributed.rank() == 0
        file = CompletionFile(args.output, lines, _settings(args)) if first else None
        done = on_first_rank(lambda: file.done if file else 0)
        left = lines[done:]
        generated = llm.generate_each(
            [prompt_line.prompt for prompt_line in left],
            [prompt_line.sampling for prompt_line in left],
            [prompt_line.where for prompt_line in left],
        )
        for line, completions in zip(left, generated, strict=True):
            if file is not None:
                file.append(line, completions)
        if file is not None:
            file.close()
            resumed = f", {done} of them before" if done else ""
            sys.stdout.write(f"{len(lines)} completions: {args.output}{resumed}\n")
    return 0
