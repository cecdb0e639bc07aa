# SPDX-License-Identifier: Apache-2.0
"""Run the training service."""

import asyncio
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.server.run import (
    LOOPBACK,
    GuardConfig,
    ServeConfig,
    ServerRun,
    bound_socket,
)
from megatron.bridge.inference.workers import Workers
from megatron.bridge.training.service import protobuf
from megatron.bridge.training.service.app import PREFIX, make_service_app
from megatron.bridge.training.service.checkpoints import Checkpoints
from megatron.bridge.training.service.commands import Sample
from megatron.bridge.training.service.rank_client import RankClient
from megatron.bridge.training.service.ranks import ServiceModel
from megatron.bridge.training.service.service import Service
from megatron.bridge.utils.errors import UserError

_BODY_BYTES = 32 << 20
_LARGE_PATHS = frozenset(
    f"{PREFIX}/{name}" for name in ("forward_backward", "forward", "asample", "telemetry")
)
_IDLE_SECONDS = 3600.0  # the client sends a heartbeat every 10 seconds
_SWEEP_SECONDS = 60.0


def serve_training(
    path: str, options: dict[str, Any], processes: int, root: Path, config: ServeConfig
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        path: Hugging Face directory or hub id of the base.
        options: Arguments of ``ServiceModel``.
        processes: Number of ranks.
        root: Folder of the weights that clients save.
        config: Address, limits and key.
    """
    if config.host not in LOOPBACK and config.api_key is None:
        raise UserError(
            f"--host {config.host} can be reached by others: give --api-key-file, or leave the host at 127.0.0.1"
        )
    checkpoints = Checkpoints(root)
    with bound_socket(config) as sock, Workers(processes, ServiceModel, path, options) as workers:
        (facts,) = workers.iterate("yield_facts", ())
        most_samples = options["max_requests"] + config.max_queue
        service = Service(config.name, path, facts, checkpoints, most_samples, _IDLE_SECONDS)
        _TrainingRun(service, workers, config).run(sock)


def count_processes(sizes: dict[str, Any], data_parallel: int) -> int:
    """Return the number of ranks of a layout.

    Args:
        sizes: Parallel sizes by the names of the provider's fields.
        data_parallel: Replicas, each of which may hold several ranks with different experts.
    """
    tensor = sizes["tensor_model_parallel_size"]
    dense_ranks = tensor * sizes["context_parallel_size"]
    expert_tensor = sizes["expert_tensor_parallel_size"] or tensor
    expert_ranks = sizes["expert_model_parallel_size"] * expert_tensor
    ranks = math.lcm(dense_ranks * data_parallel, expert_ranks)
    return int(ranks * sizes["pipeline_model_parallel_size"])


class _TrainingRun(ServerRun):
    """A training service."""

    def __init__(self, service: Service, workers: Workers, config: ServeConfig) -> None:
        super().__init__(service, config)
        self._service = service
        self._workers = workers

    def _make_app(self) -> tuple[Any, int]:
        return make_service_app(self._service), _BODY_BYTES

    def _make_guard_config(self, body_bytes: int) -> GuardConfig:
        hosts = LOOPBACK | {self._config.host} if self._config.api_key is None else None
        return GuardConfig(
            self._config.api_key,
            hosts,
            body_bytes,
            large_paths=_LARGE_PATHS,
            open_paths=("/health", "/ping"),
            media_types=("application/json", protobuf.MEDIA_TYPE),
            key_header=b"x-api-key",
        )

    def _begin(self) -> None:
        self._service.ranks = RankClient(self._workers, self._failed)
        self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            with suppress(UserError):
                await self._service.remove_idle_sessions()

    async def _end(self) -> None:
        self._sweeping.cancel()
        await self._service.close()

    async def _warm_up(self) -> None:
        assert self._service.ranks is not None, "set in _begin"
        await self._service.ranks.call(Sample, [0], Sampling(max_new_tokens=1), None)
