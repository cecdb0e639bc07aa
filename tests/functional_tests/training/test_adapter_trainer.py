# SPDX-License-Identifier: Apache-2.0
"""Several adapters that train at once under parallel layouts: each one's numbers are those of one process alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import make
from tests.toy_trainer import METHODS, SETTINGS, make_rows, make_trainer, train
from tests.workers import forget_model_parallel

TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "tp2": TP2,
    "sp2": {**TP2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
}
EP2 = {"ep2": {"expert_model_parallel_size": 2}}


def run(directory, scratch, layout):
    """Train all adapters together, with a save and a load between two steps; log-probabilities of the last pass."""
    trainer = make_trainer(directory, layout, micro_batch_size=2)
    for name, method in METHODS.items():
        trainer.add(name, method)
    train(trainer, list(METHODS), steps=2)
    for name in METHODS:
        trainer.save(name, f"{scratch}/state/{name}")
        if name != "last":
            trainer.remove(name)
        trainer.load(name, f"{scratch}/state/{name}")
    train(trainer, list(METHODS), steps=1)
    results = [result.logprobs for result in trainer.forward(make_rows())]
    for name in METHODS:
        trainer.export(name, f"{scratch}/{name}")
    # one adapter diverges: only its step is refused
    with torch.no_grad():
        for parameter in trainer._adapters.parameters("small"):
            parameter.fill_(float("nan"))
    trainer.forward_backward(make_rows())
    refused = []
    for name in METHODS:
        try:
            trainer.step(name, SETTINGS[name])
        except UserError:
            refused.append(name)
    trainer.export("large", f"{scratch}/large after")
    forget_model_parallel()
    return results, refused


def run_all(directory, scratch, layouts):
    return {name: run(directory, f"{scratch}/{name}", layout) for name, layout in layouts.items()}


def run_alone(directory, scratch):
    """Train each adapter without the others, in one process."""
    for name, method in METHODS.items():
        trainer = make_trainer(directory)
        trainer.add(name, method)
        train(trainer, [name])
        trainer.export(name, scratch / name)
        rows = [row for row in make_rows() if row.adapter == name]
        trainer.forward_backward(rows)
        trainer.step(name, SETTINGS[name])
        trainer.export(name, scratch / f"{name} after")
        forget_model_parallel()


def read(directory):
    return load_file(Path(directory) / "adapter_model.safetensors")


@pytest.mark.parametrize(("kind", "layouts"), [("llama", LAYOUTS), ("qwen3_moe", EP2)])
def test_layouts(kind, layouts, tmp_path, two_workers):
    directory = tmp_path / kind
    make(kind, directory)
    run_alone(directory, tmp_path / "alone")
    for outcome in two_workers.run(run_all, str(directory), str(tmp_path), layouts):
        for layout, (results, refused) in outcome.items():
            assert refused == ["small"], layout
            assert all(np.isfinite(row).all() for row in results), layout
    for layout in layouts:
        for name in (*METHODS, "large after"):
            expected = read(tmp_path / "alone" / name)
            tensors = read(tmp_path / layout / name)
            assert tensors.keys() == expected.keys()
            for key, tensor in tensors.items():
                close = torch.allclose(tensor, expected[key], rtol=1e-6, atol=1e-6)
                assert close, f"{layout} {name} {key}"
