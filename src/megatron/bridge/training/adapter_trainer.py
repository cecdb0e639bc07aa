# SPDX-License-Identifier: Apache-2.0
"""Train several adapters at once over one frozen base; each has an optimizer of its own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megatron.bridge.checkpoint import loading, model_io, saving, verification
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.peft.checkpoint import fingerprint, trained_state
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.row_adapters import AdaptableLayers, AdapterSet
from megatron.bridge.training.gpt_step import cut_sequences
from megatron.bridge.training.step.losses import has_router_losses
from megatron.bridge.training.step.row_losses import TrainingRow, compute_loss
from megatron.bridge.utils import distributed
from megatron.bridge.utils.config.serialize import from_plain, to_plain
from megatron.bridge.utils.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_RECORD = "trained_adapter"
_LARGEST_SETTING = (
    1e12  # AdamW raises an error if a product or quotient of two settings is above float32
)


@dataclass(frozen=True)
class AdamSettings:
    """Settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0 does not clip

    def check(self) -> None:
        """Refuse settings with which no step can be computed."""
        for key, value in vars(self).items():
            if not 0 <= value <= _LARGEST_SETTING:
                raise UserError(f"{key}={value}: must be between 0 and {_LARGEST_SETTING:g}")
        for key in ("beta1", "beta2"):
            if getattr(self, key) >= 1:
                raise UserError(f"{key}={getattr(self, key)}: must be below 1")


@dataclass(frozen=True)
class RowResult:
    """What a row gave."""

    loss: float  # sum over its tokens
    logprobs: list[float]  # of its targets


class AdapterTrainer:
    """Adapters of one base model, each trained as if it were alone.

    Rows of several adapters share forward and backward passes. All ranks call all methods with the same arguments,
    and all ranks get the results. A ``UserError`` is raised on all ranks and changes nothing.

    Args:
        bridge: Bridge of the base model.
        chunks: This rank's chunks of the base, from ``bridge.to_megatron_model(wrap_with_ddp=False)``.
        micro_batch_size: Rows of a forward pass.
    """

    def __init__(
        self, bridge: AutoBridge, chunks: Sequence[nn.Module], micro_batch_size: int = 4
    ) -> None:
        self._bridge = bridge
        self._adapters = AdapterSet(chunks)
        self._chunks: list[Any] = self._adapters.chunks
        self._config: Any = self._chunks[0].config
        self._micro_batch_size = micro_batch_size
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._steps: dict[str, int] = {}
        self._base: str | None = None
        _check_model(self._config)
        for chunk in self._chunks:
            # losses are sums over tokens, and gradients of adapters are summed in `step`
            chunk.config.calculate_per_token_loss = True
            chunk.config.finalize_model_grads_func = None
            chunk.train()

    @property
    def config(self) -> Any:
        """Return the configuration of the base."""
        return self._config

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters.methods)

    def method(self, name: str) -> LoRA:
        """Return what an adapter was added or saved with."""
        self._adapters.check(name)
        return self._adapters.methods[name]

    def adaptable_layers(self) -> AdaptableLayers:
        """Return the layers that an adapter may change."""
        with self._adapters.set_aside():
            return AdaptableLayers.of(self._chunks)

    def steps(self, name: str) -> int:
        """Return the number of optimizer steps of an adapter."""
        self._adapters.check(name)
        return self._steps[name]

    def add(self, name: str, method: LoRA) -> None:
        """Add an adapter with any rank, scaling, seed and target layers.

        Raises:
            UserError: The name exists, or the adapter cannot be trained next to others.
        """
        self._adapters.add(name, method)
        # no parameter may be on this pipeline stage
        parameters = self._adapters.parameters(name) or [nn.Parameter(torch.zeros(0))]
        optimizer = torch.optim.AdamW(parameters, foreach=False)
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
        self._optimizers[name] = optimizer
        self._steps[name] = 0

    def remove(self, name: str) -> None:
        """Remove an adapter and its optimizer."""
        self._adapters.remove(name)
        del self._optimizers[name], self._steps[name]

    def check_row(self, row: TrainingRow) -> None:
        """Refuse a row that ``forward_backward`` would refuse."""
        self._adapters.check(row.adapter)
        row.check(self._config.vocab_size, self._config.seq_length)

    def forward_backward(self, rows: Sequence[TrainingRow]) -> list[RowResult]:
        """Add the gradients of ``rows`` to those of their adapters, which ``step`` uses.

        Args:
            rows: Rows of any adapters, in any order.

        Raises:
            UserError: A row is wrong; no gradient changes.
        """
        return self._compute(rows, forward_only=False)

    def forward(self, rows: Sequence[TrainingRow]) -> list[RowResult]:
        """Compute the losses of ``rows`` without gradients."""
        return self._compute(rows, forward_only=True)

    def step(self, name: str, settings: AdamSettings) -> float:
        """Run a step of one adapter's optimizer; return the norm of its gradient before clipping.

        Raises:
            UserError: A setting or the gradient is not finite: the gradient is dropped, and nothing else changes.
        """
        self._adapters.check(name)
        settings.check()
        parameters = self._adapters.parameters(name)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _sum_gradients(parameters)
        norm = _gradient_norm(parameters)
        optimizer = self._optimizers[name]
        if not math.isfinite(norm):
            optimizer.zero_grad()
            raise UserError(
                f"adapter {name!r}: the norm of the gradient is {norm}, so the step was left out and the gradient "
                "dropped: lower the learning rate, or load an earlier state"
            )
        if 0 < settings.grad_clip_norm < norm:
            for parameter in parameters:
                assert parameter.grad is not None, "set above"
                parameter.grad.mul_(settings.grad_clip_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            group["weight_decay"] = settings.weight_decay
        optimizer.step()
        optimizer.zero_grad()
        self._steps[name] += 1
        return norm

    def save(self, name: str, directory: str | Path) -> None:
        """Save an adapter with its optimizer, for ``load`` under any layout.

        Raises:
            UserError: The directory exists, or gradients wait for a step.
        """
        self._adapters.check(name)
        waiting = any(parameter.grad is not None for parameter in self._adapters.parameters(name))
        if any(distributed.all_gather_object(waiting)):
            raise UserError(
                f"adapter {name!r} has gradients that are not in its weights yet: call step before save"
            )
        record = {
            "method": to_plain(self._adapters.methods[name]),
            "steps": self._steps[name],
            "base": self._base_fingerprint(),
        }
        with self._adapters.alone(name):
            saving.save({**self._state(name), _RECORD: record}, Path(directory))

    def load(self, name: str, directory: str | Path, with_optimizer: bool = True) -> None:
        """Load what ``save`` wrote, as an adapter of a new name or in place of the one that has the name.

        Args:
            name: Name of the adapter.
            directory: Directory of ``save``.
            with_optimizer: Also load the optimizer and the number of steps; False starts both anew.

        Raises:
            UserError: The directory is damaged, or the adapter belongs to another base; nothing changes.
        """
        path = Path(directory)
        record = loading.load_common(path).get(_RECORD)
        if record is None:
            raise UserError(f"{path} is not a saved adapter of an AdapterTrainer: give such a one")
        if record["base"] != self._base_fingerprint():
            raise UserError(
                f"{path} was trained on a base with other weights: use the base that it was trained on"
            )
        verification.verify(path)
        arriving = f"{name} (arriving)"  # the adapter of this name stays until everything is read
        self.add(arriving, from_plain(record["method"]))
        try:
            with self._adapters.alone(arriving):
                loading.load(self._state(arriving), path)
        except BaseException:
            self.remove(arriving)
            raise
        self._adapters.rename(arriving, name)
        del self._steps[arriving]
        self._optimizers[name] = self._optimizers.pop(arriving)
        self._steps[name] = record["steps"] if with_optimizer else 0
        for state in self._optimizers[name].state.values():
            state["step"].fill_(float(self._steps[name]))
            if not with_optimizer:
                for moment in _MOMENTS:
                    state[moment].zero_()

    def export(self, name: str, directory: str | Path) -> None:
        """Write an adapter in the format of the ``peft`` library."""
        with self._adapters.alone(name):
            self._bridge.save_hf_adapter(self._chunks, directory, show_progress=False)

    def _state(self, name: str) -> dict[str, Any]:
        """Return the sharded weights and moments, sharing memory with them; for inside ``alone``."""
        weights = trained_state(self._chunks, dict(model_io.MODEL_METADATA))
        states = self._optimizers[name].state
        moments: dict[str, Any] = {}
        for key, chunk in zip(model_io.chunk_keys(self._chunks), self._chunks, strict=True):
            parameters: Mapping[str, nn.Parameter] = dict(chunk.named_parameters())
            for parameter_name, entry in weights[key].items():
                assert isinstance(entry, ShardedTensor), "factors are plain shards"
                state = states[parameters[parameter_name]]
                for moment in _MOMENTS:
                    moments[f"{key}.{moment}.{parameter_name}"] = replace(
                        entry, key=f"optimizer.{moment}.{entry.key}", data=state[moment]
                    )
        return {"weights": weights, "moments": moments}

    def _base_fingerprint(self) -> str:
        if self._base is None:
            with self._adapters.set_aside():
                self._base = fingerprint(self._chunks)
        return self._base

    def _compute(self, rows: Sequence[TrainingRow], forward_only: bool) -> list[RowResult]:
        if not rows:
            raise UserError("rows is empty: give at least one row")
        for index, row in enumerate(rows):
            try:
                self.check_row(row)
            except UserError as error:
                raise UserError(f"row {index}: {error}") from error
        length = _padded_length(max(len(row.tokens) for row in rows), self._config)
        batches = self._split_rows(rows)
        logprobs = torch.zeros(len(rows), length, device=torch.cuda.current_device())
        get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, rows, length, logprobs),
            data_iterator=[iter(batches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=self._micro_batch_size,
            forward_only=forward_only,
        )
        return _make_results(rows, _share_logprobs(logprobs))

    def _split_rows(self, rows: Sequence[TrainingRow]) -> list[list[int | None]]:
        """Return the row indices of this data-parallel rank by microbatch; None is a row of padding."""
        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        size = self._micro_batch_size
        count = math.ceil(len(rows) / (ranks * size))
        padding = [None] * (count * ranks * size - len(rows))
        indices = [*range(len(rows)), *padding]
        batches = [indices[start : start + size] for start in range(0, len(indices), size)]
        return batches[rank::ranks]

    def _forward_step(
        self,
        rows: Sequence[TrainingRow],
        length: int,
        logprobs: Tensor,
        batches: Iterator[list[int | None]],
        chunk: Any,
    ) -> tuple[Tensor, Any]:
        indices = next(batches)
        # a row of padding repeats a row, with a loss of zero: it reaches no other adapter
        real = next((index for index in indices if index is not None), 0)
        batch_rows = [rows[real if index is None else index] for index in indices]
        device = torch.cuda.current_device()
        self._adapters.choice.choose([row.adapter for row in batch_rows], device)
        tensors = _pad_rows(batch_rows, length)
        batch = cut_sequences({key: value.to(device) for key, value in tensors.items()})
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["targets"])
        return output, partial(_sum_losses, batch_rows, indices, batch, logprobs)


def _check_model(config: Any) -> None:
    """Refuse models in which the rows of one adapter change the gradients of another."""
    if has_router_losses(config):
        raise UserError(
            "losses of routers are computed over the rows of all adapters: set moe_aux_loss_coeff=0 and leave "
            "moe_z_loss_coeff out before the model is built"
        )
    settings = {
        "recompute_granularity": "a recomputed layer would use the adapters of another microbatch",
        "mtp_num_layers": "layers of multi-token prediction have a loss over all rows",
        "moe_expert_capacity_factor": "tokens of one adapter would displace those of another",
        "hidden_dropout": "dropout depends on the other rows",
        "attention_dropout": "dropout depends on the other rows",
    }
    for key, reason in settings.items():
        if value := getattr(config, key, None):
            raise UserError(f"model.{key}={value}: {reason}; leave it out")


def _padded_length(length: int, config: Any) -> int:
    multiple = config.context_parallel_size
    if multiple > 1:
        multiple *= 2
    if config.sequence_parallel:
        multiple *= config.tensor_model_parallel_size
    return math.ceil(length / multiple) * multiple


def _pad_rows(rows: Sequence[TrainingRow], length: int) -> dict[str, Tensor]:
    """Return the rows as tensors of [rows, length]; padding is token 0 after the end, with a factor of 0."""
    zeros = torch.zeros(length)

    def pad(entries: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        padded = pad_sequence([zeros, *map(torch.tensor, entries)], batch_first=True)
        return padded[1:].to(dtype)

    sampled = [row.sampled_logprobs or [0.0] for row in rows]
    return {
        "tokens": pad([row.tokens for row in rows], torch.long),
        "targets": pad([row.targets for row in rows], torch.long),
        "factors": pad([row.factors() for row in rows], torch.float32),
        "sampled": pad(sampled, torch.float32),
        "position_ids": torch.arange(length).expand(len(rows), -1).contiguous(),
    }


def _sum_losses(
    rows: Sequence[TrainingRow],
    indices: Sequence[int | None],
    batch: Mapping[str, Tensor],
    logprobs: Tensor,
    token_losses: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the rows' losses, and write their log-probabilities to ``logprobs``."""
    token_logprobs = -token_losses.float()
    total = token_logprobs.new_zeros(())
    for position, index in enumerate(indices):
        if index is None:
            # keeps the shape of the graph; no gradient
            total = total + 0.0 * token_logprobs[position].sum()
            continue
        row_logprobs = token_logprobs[position]
        factors = batch["factors"][position]
        sampled = batch["sampled"][position]
        positions = batch["position_ids"][position]
        total = total + compute_loss(rows[position], row_logprobs, factors, sampled, positions)
        logprobs[index, positions] = row_logprobs.detach()
    return total, torch.ones((), dtype=torch.int), {}


def _share_logprobs(logprobs: Tensor) -> Tensor:
    """Collect the parts of all ranks, which are zero elsewhere."""
    replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        dist.all_reduce(logprobs, group=replicas)
    stages: Any = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(logprobs, src=last, group=stages)
    return logprobs.cpu()


def _make_results(rows: Sequence[TrainingRow], logprobs: Tensor) -> list[RowResult]:
    results = []
    for row, padded in zip(rows, logprobs, strict=True):
        row_logprobs = padded[: len(row.tokens)]
        factors = torch.tensor(row.factors(), dtype=torch.float32)
        sampled = torch.tensor(row.sampled_logprobs or [0.0], dtype=torch.float32)
        positions = torch.arange(len(row.tokens))
        loss = compute_loss(row, row_logprobs, factors, sampled, positions)
        results.append(RowResult(float(loss), row_logprobs.tolist()))
    return results


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of an adapter over the ranks that computed parts of them."""
    replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensor_ranks: Any = parallel_state.get_tensor_model_parallel_group()
    for parameter in parameters:
        assert parameter.grad is not None, "the caller sets it"
        if replicas.size() > 1:
            dist.all_reduce(parameter.grad, group=replicas)
        if tensor_ranks.size() > 1 and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=tensor_ranks)


def _gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm over all ranks; a replicated factor counts once."""
    squares = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    for parameter in parameters:
        assert parameter.grad is not None, "the caller sets it"
        if is_first or getattr(parameter, "tensor_model_parallel", False):
            squares += parameter.grad.double().square().sum()
    dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
    return float(squares.sqrt())
