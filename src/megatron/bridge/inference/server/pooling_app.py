# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Endpoints of a server for models that score or embed texts."""

import asyncio
import base64
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import Field, model_validator

from megatron.bridge.inference.conversations.options import Strict, Text
from megatron.bridge.inference.pooling import PoolingFacts, check_tokens
from megatron.bridge.inference.server.app import add_state_endpoints, new_app
from megatron.bridge.inference.server.errors import ApiError
from megatron.bridge.inference.server.planner import check_model_name
from megatron.bridge.inference.workers import Workers

MOST_TEXTS = 2048  # OpenAI's limit of /v1/embeddings
type TokenIds = Annotated[list[int], Field(min_length=1)]


@dataclass
class PoolingServer:
    """State that the endpoints share.

    Attributes:
        name: Name of the model.
        facts: The model's tokenizer, context and head.
        workers: The processes that hold the model.
        created: Start time of the server in seconds since 1970.
        seconds: Time limit of a request.
        is_ready: Whether the model has computed a text.
    """

    name: str
    facts: PoolingFacts
    workers: Workers
    created: int
    seconds: float
    is_ready: bool = False
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model."""
        if name is not None:
            check_model_name(name, [self.name])

    async def encode(self, texts: Sequence[str | list[int]], name: str) -> list[list[int]]:
        """Return the token ids of texts, and refuse texts that are too long; ``name`` is their field."""
        return await self._run(self._encode, texts, name)

    def _encode(self, texts: Sequence[str | list[int]], name: str) -> list[list[int]]:
        encode = self.facts.hf.encode
        ids = [encode(text) if isinstance(text, str) else text for text in texts]
        for tokens in ids:
            check_tokens(tokens, self.facts, name)
        return ids

    async def pool(self, ids: list[list[int]]) -> list[np.ndarray]:
        """Return what the head says of each text; requests are computed in turn."""
        try:
            async with asyncio.timeout(self.seconds):
                vectors = await self._run(self._pool, ids)
        except TimeoutError as error:
            message = f"the request exceeded {self.seconds:.0f} s: send fewer texts, or try again"
            raise ApiError(504, message, code="timeout") from error
        if not all(np.isfinite(vector).all() for vector in vectors):
            message = "the model's outputs are not numbers (NaN): look for NaN in its weights or its adapter"
            raise ApiError(500, message, code="not_finite")
        return vectors

    def _pool(self, ids: list[list[int]]) -> list[np.ndarray]:
        (vectors,) = self.workers.iterate("pool_ids", (ids,))
        return [vector.numpy() for vector in vectors]

    async def _run(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


class _Request(Strict):
    model: str | None = None
    # these change no number
    user: str | None = None
    priority: int | None = None


class EmbeddingRequest(_Request):
    """The body of ``/v1/embeddings``."""

    input: Text | TokenIds | list[Text] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)

    @property
    def texts(self) -> list[Any]:
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [self.input]
        return list(self.input)

    @model_validator(mode="after")
    def _check_count(self) -> "EmbeddingRequest":
        _check_count("input", len(self.texts))
        return self


class ClassifyRequest(_Request):
    """The body of ``/classify``."""

    input: Text | list[Text]

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input

    @model_validator(mode="after")
    def _check_count(self) -> "ClassifyRequest":
        _check_count("input", len(self.texts))
        return self


class ScoreRequest(_Request):
    """The body of ``/score``."""

    text_1: Text | list[Text]
    text_2: Text | list[Text]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True))

    @model_validator(mode="after")
    def _check_pairs(self) -> "ScoreRequest":
        first = 1 if isinstance(self.text_1, str) else len(self.text_1)
        second = 1 if isinstance(self.text_2, str) else len(self.text_2)
        _check_count("text_2", second)
        if first not in (1, second):
            raise ValueError(
                f"text_1 has {first} texts and text_2 {second}: give one for each, or one for all"
            )
        return self


class RerankRequest(_Request):
    """The body of ``/v1/rerank``, as Jina and Cohere have it."""

    query: Text
    documents: list[Text]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None

    @model_validator(mode="after")
    def _check_count(self) -> "RerankRequest":
        _check_count("documents", len(self.documents))
        return self


def _check_count(name: str, count: int) -> None:
    if not 0 < count <= MOST_TEXTS:
        raise ValueError(f"{name} has {count} texts: send 1 to {MOST_TEXTS}")


_FIELDS = {
    "/v1/embeddings": EmbeddingRequest.model_fields,
    "/classify": ClassifyRequest.model_fields,
    "/score": ScoreRequest.model_fields,
    "/v1/score": ScoreRequest.model_fields,
    "/rerank": RerankRequest.model_fields,
    "/v1/rerank": RerankRequest.model_fields,
}


def make_pooling_app(server: PoolingServer) -> FastAPI:
    """Create the application."""
    app = new_app(_FIELDS)
    card = {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "megatron-bridge",
        "max_model_len": server.facts.max_context,
    }
    add_state_endpoints(app, lambda: {server.name: card}, lambda: server.is_ready)
    if server.facts.head == "embedding":
        _add_embeddings(app, server)
    else:
        _add_classes(app, server)
    if server.facts.head == "embedding" or len(server.facts.labels) == 1:
        _add_scores(app, server)
    return app


def _add_embeddings(app: FastAPI, server: PoolingServer) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> dict[str, Any]:
        server.check_model(body.model)
        ids = await server.encode(body.texts, "input")
        vectors = await server.pool(ids)
        if body.dimensions is not None:
            vectors = [_shorten(vector, body.dimensions) for vector in vectors]
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _as_base64(vector)
                if body.encoding_format == "base64"
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        return _answer(server, "list", data, ids)


def _add_classes(app: FastAPI, server: PoolingServer) -> None:
    @app.post("/classify")
    async def classify(body: ClassifyRequest) -> dict[str, Any]:
        server.check_model(body.model)
        ids = await server.encode(body.texts, "input")
        data = [
            _classified(index, scores, server.facts.labels)
            for index, scores in enumerate(await server.pool(ids))
        ]
        return _answer(server, "list", data, ids)


def _add_scores(app: FastAPI, server: PoolingServer) -> None:
    @app.post("/score")
    @app.post("/v1/score")
    async def score(body: ScoreRequest) -> dict[str, Any]:
        server.check_model(body.model)
        scores, ids = await _score_pairs(server, body.pairs)
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(scores)
        ]
        return _answer(server, "list", data, ids)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    async def rerank(body: RerankRequest) -> dict[str, Any]:
        server.check_model(body.model)
        pairs = [(body.query, document) for document in body.documents]
        scores, ids = await _score_pairs(server, pairs)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in best[: body.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        answer = _answer(server, "list", [], ids)
        return {
            "id": answer["id"],
            "model": server.name,
            "results": results,
            "usage": answer["usage"],
        }


async def _score_pairs(
    server: PoolingServer, pairs: list[tuple[str, str]]
) -> tuple[list[float], list[list[int]]]:
    """Return how well the second text of each pair fits the first one, and the token ids that were computed.

    For an embedding model this is the cosine of both embeddings. A model with one score reads both texts together, as
    transformers' tokenizer joins a pair, and the score goes through a sigmoid.
    """
    hf = server.facts.hf
    if server.facts.head == "embedding":
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids = await server.encode(texts, "text_2")
        vectors = dict(zip(texts, await server.pool(ids), strict=True))
        return [float(vectors[first] @ vectors[second]) for first, second in pairs], ids
    ids = await server.encode([hf.encode(first, second) for first, second in pairs], "text_2")
    scores = await server.pool(ids)
    return [_sigmoid(score[0]) for score in scores], ids


def _shorten(vector: np.ndarray, dimensions: int) -> np.ndarray:
    """Return the first ``dimensions`` numbers, scaled to norm 1 (for Matryoshka embeddings)."""
    if dimensions > len(vector):
        raise ApiError(
            400,
            f"dimensions={dimensions} is more than the {len(vector)} of this model",
            "dimensions",
        )
    shortened = vector[:dimensions]
    return shortened / np.linalg.norm(shortened)


def _as_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _classified(index: int, scores: np.ndarray, labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the class of a text, probabilities, and the scores themselves, which are transformers' ``logits``."""
    if len(labels) == 1:
        probabilities = [_sigmoid(scores[0])]
    else:
        exponentials = np.exp(scores - scores.max())
        probabilities = (exponentials / exponentials.sum()).tolist()
    return {
        "index": index,
        "label": labels[int(scores.argmax())],
        "probs": probabilities,
        "logits": scores.tolist(),
        "num_classes": len(labels),
    }


def _sigmoid(score: float) -> float:
    return float(1 / (1 + np.exp(-score)))


def _answer(
    server: PoolingServer, kind: str, data: list[dict[str, Any]], ids: list[list[int]]
) -> dict[str, Any]:
    tokens = sum(map(len, ids))
    return {
        "id": f"pool-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": server.name,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
