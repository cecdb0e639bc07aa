# SPDX-License-Identifier: Apache-2.0
"""Completions by a server of vLLM or SGLang, which gets the weights of the run before each generation."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Completion, Sampling, TokenLogprob
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.pretrained import export_bridge
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig, RolloutServerConfig
from megatron.bridge.training.generation import end_ids, open_engine, transformers_tokenizer
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.reinforcement.http_session import open_session
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError, one_line

if TYPE_CHECKING:
    import requests

KEY = "grpo.server"
Json = dict[str, Any]


class RolloutEngine(Protocol):
    """What generation needs of an engine: this package's own, or a server."""

    hf: Any
    """The tokenizer of transformers; None if completions have no text."""

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Sequence["RolloutJob"]:
        """Ask for ``sampling.n`` completions of a prompt."""
        ...

    def run(self) -> Iterator[Any]:
        """Compute all completions that were asked for."""
        ...


class RolloutJob(Protocol):
    """A completion that an engine computes."""

    @property
    def completion(self) -> Completion: ...


@dataclass
class ServerJob:
    """A completion that a server writes; it is empty before ``ServerEngine.run``."""

    completion: Completion


@dataclass
class _Request:
    """A prompt that waits for its completions."""

    tokens: list[int]
    sampling: Sampling
    jobs: list[ServerJob]


class RolloutServer:
    """The client of a server, and what it knows of the server's weights.

    Args:
        settings: The server and the folder through which it gets weights.
    """

    def __init__(self, settings: RolloutServerConfig) -> None:
        if not settings.base_url or not settings.weights_dir:
            raise UserError(
                f"{KEY} needs base_url, such as http://localhost:8000, and weights_dir, a folder that the run and "
                f"the server see, best in memory; they are {settings.base_url!r} and {settings.weights_dir!r}"
            )
        self.settings = settings
        self._folder = Path(settings.weights_dir)
        self._step_of_weights: int | None = None
        self._model = settings.model
        self._session: requests.Session | None = None

    def update_weights(self, run: Run) -> None:
        """Give the server the weights of ``run``, unless it has them; all ranks must call this."""
        step = run.progress.step
        if self._step_of_weights == step:
            return
        bridge: AutoBridge = export_bridge(run.model, run.config.checkpoint.pretrained_checkpoint)
        try:
            with gathered_params(run.model):
                bridge.save_hf_weights(run.model, self._folder, show_progress=False)
        except UserError as error:
            raise UserError(f"{KEY}.weights_dir={self._folder}: {error}") from error
        on_first_rank(self._load_weights)
        self._step_of_weights = step

    def _load_weights(self) -> None:
        """Ask the server to read the folder, and to forget what it computed with earlier weights."""
        folder = str(self._folder.resolve())
        if self.settings.engine == "sglang":
            reply = self._post("/update_weights_from_disk", {"model_path": folder})
            if not reply.get("success", False):
                message = " ".join(str(reply.get("message")).split())
                raise UserError(
                    f"{KEY}.weights_dir={folder}: the server does not load it: {message}"
                )
            self._post("/flush_cache", {})
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._post("/collective_rpc", body, hint="start vLLM with VLLM_SERVER_DEV_MODE=1")
        self._post("/reset_prefix_cache", {})

    def complete(self, requests_: Sequence[_Request], ends: frozenset[int]) -> list[list[Json]]:
        """The completions of each prompt, in the order of ``requests_``; only for the first rank.

        Returns:
            For each prompt, ``n`` mappings with ``tokens``, ``log_probs`` and ``finish_reason``.
        """
        with ThreadPoolExecutor(self.settings.concurrency) as threads:
            return list(threads.map(lambda request: self._complete(request, ends), requests_))

    def _complete(self, request: _Request, ends: frozenset[int]) -> list[Json]:
        sampling = request.sampling
        common: Json = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "n": sampling.n,
            "stop_token_ids": sorted(ends.union(sampling.stop_ids)),
            "skip_special_tokens": False,
        }
        if self.settings.engine == "sglang":
            limits = {"max_new_tokens": sampling.max_new_tokens, "no_stop_trim": True}
            reply = self._post(
                "/generate",
                {
                    "input_ids": request.tokens,
                    "sampling_params": common | limits,
                    "return_logprob": True,
                },
            )
            replies: Any = reply if isinstance(reply, list) else [reply]
            return [_read_sglang(choice) for choice in replies]
        reply = self._post(
            "/v1/completions",
            {
                **common,
                "model": self._name_of_model(),
                "prompt": request.tokens,
                "max_tokens": sampling.max_new_tokens,
                "logprobs": 0,
                "seed": (sampling.seed or 0) % 2**31,
                "return_token_ids": True,
            },
        )
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return [self._read_vllm(choice) for choice in choices]

    def _read_vllm(self, choice: Json) -> Json:
        if not choice.get("token_ids"):
            raise UserError(
                f"{KEY}.base_url={self.settings.base_url}: the server returns no token_ids: use vLLM 0.11 or later"
            )
        return {
            "tokens": choice["token_ids"],
            "log_probs": choice["logprobs"]["token_logprobs"],
            "finish_reason": choice["finish_reason"],
        }

    def _name_of_model(self) -> str:
        if self._model is None:
            self._model = str(self._get("/v1/models")["data"][0]["id"])
        return self._model

    def _get(self, path: str) -> Any:
        return self._send("GET", path, None)

    def _post(self, path: str, body: Json, hint: str = "see the log of the server") -> Any:
        return self._send("POST", path, body, hint)

    def _send(
        self, method: str, path: str, body: Json | None, hint: str = "see the log of the server"
    ) -> Any:
        import requests  # a quarter of a second, which runs without a server do not pay

        if self._session is None:
            self._session = open_session(self.settings.concurrency, self.settings.api_key_variable)
        address = str(self.settings.base_url).rstrip("/").removesuffix("/v1")
        try:
            reply = self._session.request(
                method, address + path, json=body, timeout=self.settings.timeout_seconds
            )
            if not reply.ok:
                raise UserError(
                    f"{KEY}.base_url={self.settings.base_url}: {path} answers {reply.status_code}: "
                    f"{' '.join(reply.text.split())[:300]}: {hint}"
                )
            is_json = reply.headers.get("content-type", "").startswith("application/json")
            return reply.json() if is_json else {}
        except requests.RequestException as error:
            raise UserError(
                f"{KEY}.base_url={self.settings.base_url}: {path} fails with {type(error).__name__}: "
                f"{one_line(error)}: check that the server runs"
            ) from error


def _read_sglang(reply: Json) -> Json:
    about = reply["meta_info"]
    log_probs = about["output_token_logprobs"]
    return {
        "tokens": [token for _, token, *_ in log_probs],
        "log_probs": [log_prob for log_prob, *_ in log_probs],
        "finish_reason": about["finish_reason"]["type"],
    }


class ServerEngine:
    """Completions of a server in the form of this package's engine. All ranks make the same calls.

    Args:
        server: The client, which only the first rank uses.
        ends: Tokens that end a completion.
        hf: The tokenizer of transformers, or None.
    """

    def __init__(self, server: RolloutServer, ends: frozenset[int], hf: Any) -> None:
        self.hf = hf
        self._server = server
        self._ends = ends
        self._requests: list[_Request] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> list[ServerJob]:
        """Ask for ``sampling.n`` completions of a prompt."""
        tokens = list(prompt)
        jobs = [
            ServerJob(Completion(tokens, choice=choice, seed=sampling.seed or 0))
            for choice in range(sampling.n)
        ]
        self._requests.append(_Request(tokens, sampling, jobs))
        return jobs

    def run(self) -> Iterator[None]:
        """Wait for the completions of all prompts."""
        waiting = self._requests
        self._requests = []
        replies = on_first_rank(lambda: self._server.complete(waiting, self._ends))
        for request, choices in zip(waiting, replies, strict=True):
            for job, choice in zip(request.jobs, choices, strict=True):
                self._fill(job.completion, choice, request.sampling)
        yield

    def _fill(self, completion: Completion, choice: Json, sampling: Sampling) -> None:
        completion.tokens = list(choice["tokens"])
        completion.finish_reason = "length" if choice["finish_reason"] == "length" else "stop"
        completion.logprobs = [
            TokenLogprob(token, log_prob, is_most_likely=False)
            for token, log_prob in zip(choice["tokens"], choice["log_probs"], strict=True)
        ]
        if self.hf is not None:
            hidden = set(self.hf.all_special_ids).difference(sampling.shown_ids)
            visible = [token for token in completion.tokens if token not in hidden]
            completion.text = self.hf.decode(visible, clean_up_tokenization_spaces=False)


@contextmanager
def open_rollout_engine(
    run: Run, settings: GRPOConfig, server: RolloutServer | None
) -> Iterator[Engine | ServerEngine]:
    """The engine that generates with the weights of ``run``; all ranks must call this.

    Args:
        run: The run.
        settings: The limits of this package's engine.
        server: The server that generates; None for this package's engine.
    """
    if server is None:
        with open_engine(run, settings) as engine:
            yield engine
        return
    server.update_weights(run)
    yield ServerEngine(server, end_ids(run.config, run.tokenizer), transformers_tokenizer(run))
