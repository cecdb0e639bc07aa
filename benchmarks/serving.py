# SPDX-License-Identifier: Apache-2.0
"""The server under clients, against the same prompts offline, and the times that a client sees.

``PYTHONPATH=.cache/serve python -m benchmarks.serving --clients 1,16`` serves random weights of SmolLM2-135M's
shape. Each client streams one request after the other; offline, ``LLM.generate`` gets all prompts at once, in a
process of its own as the server's engine is. With ``--transformers``, ``transformers serve`` gets them, too, alone
and with its continuous batching.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.inference import make_model, prompts
from benchmarks.measure import table
from megatron.bridge.utils.processes import free_port


@contextmanager
def server(folder: str, clients: int) -> Any:
    """The address of a server."""
    command = [
        sys.executable,
        "-m",
        "megatron.bridge.cli.main",
        "serve",
        folder,
        "--port",
        "0",
        "--name",
        "model",
    ]
    options = ["--dtype", "float32", "--max-requests", str(clients), "--max-context", "512"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextmanager
def transformers_server(folder: str, *options: str) -> Any:
    """The address of ``transformers serve``."""
    port = str(free_port())
    program = str(Path(sys.executable).with_name("transformers"))
    place = ["--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32"]
    command = [program, "serve", folder, *place, *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            while not _is_up(f"{address}/health"):
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


async def one_client(
    client: Any, model: str, texts: Sequence[Any], count: int, times: dict[str, list[float]]
) -> None:
    more = (
        {"extra_body": {"ignore_eos": True}} if model == "model" else {}
    )  # the model itself has no end token
    for text in texts:
        last = start = time.perf_counter()
        stream = await client.completions.create(
            model=model, prompt=text, max_tokens=count, temperature=0, stream=True, **more
        )
        async for _ in stream:
            now = time.perf_counter()
            times["first" if last == start else "between"].append(now - last)
            last = now


async def load(
    address: str, texts: Sequence[Any], clients: int, count: int, model: str = "model"
) -> tuple[float, dict[str, Any]]:
    """Generated tokens a second, and what clients waited for."""
    from openai import AsyncOpenAI

    times: dict[str, list[float]] = {"first": [], "between": []}
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=3600) as client:
        await one_client(client, model, texts[:1], 2, {"first": [], "between": []})
        start = time.perf_counter()
        shares = [texts[number::clients] for number in range(clients)]
        await asyncio.gather(*(one_client(client, model, share, count, times) for share in shares))
        seconds = time.perf_counter() - start
    return len(texts) * count / seconds, times


def offline(folder: str, texts: list[list[int]], clients: int, count: int, answer: Any) -> None:
    """The same prompts without a server."""
    from megatron.bridge.inference.llm import LLM
    from megatron.bridge.inference.requests import Sampling

    sampling = Sampling(max_new_tokens=count, ignore_eos=True)
    with LLM(folder, dtype="float32", max_requests=clients, max_context=512) as llm:
        llm.generate(texts[:1], Sampling(max_new_tokens=2))
        start = time.perf_counter()
        llm.generate(texts, sampling)
        answer.put(len(texts) * count / (time.perf_counter() - start))


def in_a_process(*args: Any) -> float:
    context = get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=offline, args=(*args, answer))
    process.start()
    found = answer.get()
    process.join()
    return found


def at(values: list[float], percent: int) -> str:
    """A percentile in ms."""
    return f"{statistics.quantiles(values, n=100)[percent - 1] * 1e3:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="1,16")
    parser.add_argument("--each", type=int, default=2, help="requests of each client")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--transformers", action="store_true", help="measure transformers serve, too"
    )
    args = parser.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = make_model(Path(folder), "float32").config.vocab_size
        hf = add_tokenizer(folder, vocabulary)
        (Path(folder) / "generation_config.json").write_text("{}")  # no end token
        for clients in map(int, args.clients.split(",")):
            texts = prompts(clients * args.each, vocabulary)
            for _ in range(args.rounds):
                plain = in_a_process(folder, texts, clients, args.tokens)
                with server(folder, clients) as address:
                    speed, times = asyncio.run(load(address, texts, clients, args.tokens))
                rows.append(
                    ["this server", *figures(clients, speed, times), f"{speed / plain:.2f}"]
                )
                for options in TRANSFORMERS if args.transformers else ():
                    with transformers_server(folder, *options) as address:
                        same = [hf.decode(text) for text in texts]
                        speed, times = asyncio.run(
                            load(address, same, clients, args.tokens, folder)
                        )
                    name = " ".join(("transformers serve", *options))
                    rows.append([name, *figures(clients, speed, times), f"{speed / plain:.2f}"])
    heads = [
        "server",
        "clients",
        "tok/s",
        "first p50 ms",
        "p99",
        "between p50 ms",
        "p99",
        "to offline",
    ]
    print(table(heads, rows))


TRANSFORMERS = ((), ("--continuous-batching",))


def figures(clients: int, speed: float, times: dict[str, list[float]]) -> list[str]:
    waits = [at(times[name], percent) for name in ("first", "between") for percent in (50, 99)]
    return [str(clients), f"{speed:.1f}", *waits]


def add_tokenizer(folder: str, vocabulary: int) -> Any:
    """A tokenizer with a text for each token that the model may generate."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained("tutorials/data/tokenizer")
    hf.add_tokens([f"word{number} " for number in range(len(hf), vocabulary)])
    hf.save_pretrained(folder)
    return hf


if __name__ == "__main__":
    main()
