# SPDX-License-Identifier: Apache-2.0
"""A student's run is that of one process, whatever the layout."""

import pytest
import torch
import torch.distributed as dist

from tests.toy_distill import HIDDEN, LEARN, run_student, save_teacher
from tests.toy_run import whole_weights

PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
TP2 = {"tensor_model_parallel_size": 2}
TOP = {**LEARN, "top_k": 8}  # the 8th and 9th differ by 4e-4 at least: rounding does not swap them
CASES = {
    "tp2 hidden": (HIDDEN, TP2),
    "sp2 hidden": (HIDDEN, {**TP2, "sequence_parallel": True}),
    "tp2 top": (TOP, TP2),
    "pp2 hidden": (HIDDEN, PP2),
    "vp2": (LEARN, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2 hidden": (HIDDEN, {}),
    "cp2 hidden": (HIDDEN, {"context_parallel_size": 2}),
}
FOUR = {
    "tp2 pp2 hidden": (HIDDEN, {**TP2, **PP2, "sequence_parallel": True}),
    "pp4 hidden": (HIDDEN, {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.float32}),
}
STEPS = 3


def run(teacher, learn, layout):
    record, losses = run_student(teacher, learn, model=dict(layout), train={"train_iters": STEPS})
    return record, losses.train, losses.valid


def run_all(teacher, cases):
    return {name: run(teacher, *case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def alone(teacher):
    """The runs of one process."""
    torch.set_num_threads(1)
    found = {name: run(teacher, learn, {}) for name, learn in (("hidden", HIDDEN), ("top", TOP), ("kl", LEARN))}
    dist.destroy_process_group()
    return found


def compare(ranks, alone, cases):
    for name, (learn, _) in cases.items():
        expected, train, valid = alone["hidden" if learn is HIDDEN else "top" if learn is TOP else "kl"]
        weights, reference = whole_weights([rank[name][0] for rank in ranks]), whole_weights([expected])
        assert weights.keys() == reference.keys()
        for rank in ranks:
            for found, wanted in zip([*rank[name][1], *rank[name][2]], [*train, *valid], strict=True):
                assert found == pytest.approx(wanted, rel=2e-6), name
        for key, weight in reference.items():
            assert (weights[key] - weight).abs().max() < 2e-5, f"{name} {key}"


def test_losses_are_told_apart(alone):
    names = {name: set(train[0]) for name, (_, train, _) in alone.items()}
    assert names == {
        "hidden": {"lm loss", "kl loss", "hidden loss"},
        "top": {"lm loss", "kl loss"},
        "kl": {"lm loss", "kl loss"},
    }
    _, train, valid = alone["hidden"]
    assert set(valid[-1]) == set(train[-1])


def test_two_processes(teacher, alone, two_workers):
    compare(two_workers.run(run_all, teacher, CASES), alone, CASES)


def test_four_processes(teacher, alone, four_workers):
    compare(four_workers.run(run_all, teacher, FOUR), alone, FOUR)
