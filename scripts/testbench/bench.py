# SPDX-License-Identifier: Apache-2.0
"""A model of a run on this rank, and the inputs that its operators get in a forward pass."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_map_only

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.activation_sizes import ActivationSizes, sizes_of
from megatron.bridge.autotune.predict import run_of
from megatron.bridge.autotune.time.work import LayerSettings
from megatron.bridge.training import setup
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import cut_sequences, on_device, packed_parameters
from megatron.bridge.utils.errors import UserError
from scripts.testbench.cases import Case

Target = tuple[Any, str]  # an object and the name of its method
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Bench:
    """The chunk of a model on this rank, without data parallelism, and the batch of a case.

    ``config`` is resolved for the processes of this job, which build their process groups here.
    """

    def __init__(self, config: ConfigContainer) -> None:
        if config.model.pipeline_model_parallel_size > 1:
            raise UserError(
                f"model.pipeline_model_parallel_size={config.model.pipeline_model_parallel_size}: the testbench runs "
                "operators of one stage, set it to 1"
            )
        setup.initialize(config)
        self.config = config
        (self.wrapped,) = config.model.provide_distributed_model(wrap_with_ddp=False)
        self.chunk: Any = unwrap_model(self.wrapped)
        self._captured: dict[Any, Arguments] = {}
        self.select(Case(config.dataset.seq_length, config.train.micro_batch_size))

    def select(self, case: Case) -> None:
        """Run ``case`` from now on."""
        self.case = case
        self._captured.clear()
        self.sized = copy.copy(self.config)
        self.sized.model = self.config.model.resolved()  # with the kernels that this machine has
        self.sized.dataset, self.sized.train = (
            copy.copy(self.config.dataset),
            copy.copy(self.config.train),
        )
        self.sized.dataset.seq_length, self.sized.train.micro_batch_size = case.seqlen, case.samples
        self.__dict__.pop("batch", None)

    @cached_property
    def meta(self) -> MegatronModule:
        """The same chunk on the meta device, which the theory reads."""
        (chunk,) = meta_model.stage_chunks(self.config.model)[0]
        return chunk.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.config.model.resolved().params_dtype

    @property
    def sizes(self) -> ActivationSizes:
        return sizes_of(self.sized)

    @property
    def run(self) -> LayerSettings:
        return run_of(self.sized)

    @cached_property
    def batch(self) -> dict[str, Any]:
        """Arguments of the model for this rank's part of random tokens."""
        case = self.case
        rows = (1, case.tokens) if case.shape == "thd" else (case.samples, case.seqlen)
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.config.model.vocab_size or 1, rows, generator=random)
        positions = torch.arange(case.seqlen).repeat(rows[0], rows[1] // case.seqlen)
        values: dict[str, Any] = {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "position_ids": positions,
        }
        if case.shape == "thd":
            bounds = torch.arange(0, case.tokens + 1, case.seqlen, dtype=torch.int32)
            values |= {"cu_seqlens": bounds, "max_seqlen": case.seqlen}
        values = cut_sequences(on_device(values))
        arguments = {"input_ids": values["tokens"], "attention_mask": None}
        arguments |= {name: values[name] for name in ("position_ids", "labels")}
        if case.shape == "thd":
            arguments["packed_seq_params"] = packed_parameters(values)
        if self.config.model.mtp_num_layers:
            arguments["loss_mask"] = torch.ones_like(values["labels"], dtype=torch.float)
        return arguments

    def forward(self) -> torch.Tensor:
        return self.wrapped(**self.batch)

    def inputs(self, target: Target) -> Arguments:
        """Arguments of ``target`` in a forward pass of the model; tensors are copies that a graph starts from."""
        key = (id(target[0]), target[1])
        if key not in self._captured:
            with _recording({key: target}, self._captured):
                self.forward()
        if key not in self._captured:
            raise UserError(
                f"{type(target[0]).__name__}.{target[1]} is not called in a forward pass of this model"
            )
        return tree_map_only(torch.Tensor, _leaf, self._captured[key])


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def _recording(targets: Mapping[Any, Target], found: dict[Any, Arguments]) -> Iterator[None]:
    """While it is entered, the first call of each target puts its arguments into ``found``."""
    for key, (owner, name) in targets.items():
        owner.__dict__[name] = _recorder(getattr(owner, name), key, found)
    try:
        yield
    finally:
        for owner, name in targets.values():
            del owner.__dict__[name]


def _recorder(
    method: Callable[..., Any], key: Any, found: dict[Any, Arguments]
) -> Callable[..., Any]:
    def recorder(*args: Any, **kwargs: Any) -> Any:
        found.setdefault(key, (args, kwargs))
        return method(*args, **kwargs)

    return recorder
