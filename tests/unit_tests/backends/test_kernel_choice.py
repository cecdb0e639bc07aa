# SPDX-License-Identifier: Apache-2.0
"""Attention kernels are chosen by each model for itself, and the process is as it was."""

import os

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.bridge.backends.attention.kernel_choice import kernel_variables, run_with_variables
from tests.refusals import refused
from tests.toy_run import toy_config


def build(backend):
    provider = toy_config(model={"num_layers": 1}).model
    provider.attention_backend = backend
    return provider.provide_distributed_model(wrap_with_ddp=False)


@pytest.mark.usefixtures("one_rank")
def test_models_of_one_process_choose_for_themselves():
    before = dict(os.environ)
    for backend in (AttnBackend.flash, AttnBackend.fused, AttnBackend.unfused, AttnBackend.auto):
        (model,) = build(backend)
        tokens = torch.arange(8)[None]
        model(tokens, tokens, None)
        changed = {name for name in os.environ if os.environ[name] != before.get(name)}
        assert not [name for name in changed if name.startswith("NVTE_")]


@pytest.mark.usefixtures("one_rank")
def test_a_contradiction_is_named(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with refused("NVTE_FUSED_ATTN=0", "model.attention_backend=fused", "unset"):
        build(AttnBackend.fused)


def test_variables_are_set_while_attention_runs_and_is_recomputed(monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    seen = []

    class Attention(nn.Module):
        def forward(self, states):
            seen.append([os.environ.get(name) for name in variables])
            return states * states

    config = toy_config().model
    config.attention_backend, config.flash_attention_version = AttnBackend.fused, 3
    variables = kernel_variables(config)
    attention = Attention()
    run_with_variables(attention, variables)
    states = torch.ones(2, requires_grad=True)
    checkpoint(attention, states, use_reentrant=False).sum().backward()
    assert seen == [["0", "1", "0", "0", "0"]] * 2
    assert list(variables)[3:] == ["NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V4"]
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert "NVTE_FUSED_ATTN" not in os.environ
