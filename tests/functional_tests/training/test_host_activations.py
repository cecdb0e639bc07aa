# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory: bitwise the same numbers, and nothing of the layers stays where it was."""

import gc

import pytest
import torch

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.training.callbacks import Callback
from tests.toy_run import run_toy

STEPS = 3
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def arguments(**model):
    return {"model": model, "train": {"train_iters": STEPS}}


@pytest.mark.parametrize("model", [{}, EXPERTS, RECOMPUTED, DROPOUT])
def test_numbers_are_bitwise_the_same(run_in_process, model):
    usual = run_toy(arguments(**model))
    on_host = run_toy(arguments(cpu_offloading=True, cpu_offloading_num_layers=3, **model))
    assert on_host.numbers == usual.numbers


@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_numbers_of_two_processes_are_bitwise_the_same(two_workers, size):
    usual = two_workers.run(run_toy, arguments(**{size: 2}))
    offloading = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
    on_host = two_workers.run(run_toy, arguments(**{size: 2}, **offloading))
    for rank in range(2):
        assert on_host[rank].numbers == usual[rank].numbers


class SavedOutsideOfLayers(Callback):
    """Addresses of what layers computed that are alive after the forward pass of the first microbatch."""

    def __init__(self):
        self.stored = set()
        self.alive = []

    def on_train_start(self, context):
        step = context.forward_step
        model = unwrap(context.model[0])
        for layer in model.decoder.layers:
            layer.mlp.linear_fc1.register_forward_hook(self._note)

        def watched(batches, *rest):
            result = step(batches, *rest)
            gc.collect()
            if model.training:
                self.alive.append(sum(storage() is not None for storage in self.stored))
            self.stored.clear()
            return result

        context.forward_step = watched

    def _note(self, module, inputs, outputs):
        self.stored.add(Reference(outputs[0]))


class Reference:
    """A weak reference to the memory of a tensor, by its identity."""

    def __init__(self, tensor):
        self._storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())

    def __call__(self):
        return None if self._storage.expired() else self._storage


def test_only_the_layers_that_are_not_offloaded_keep_what_they_compute(run_in_process):
    for count in (1, 3):
        seen = SavedOutsideOfLayers()
        offloading = {"cpu_offloading": True, "cpu_offloading_num_layers": count}
        run_toy(arguments(**offloading), callbacks=[seen])
        # outputs of the MLP's first layer, which its activation saves
        assert set(seen.alive) == {4 - count}
