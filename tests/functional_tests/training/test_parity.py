# SPDX-License-Identifier: Apache-2.0
"""A parallel run gives the numbers of the single-process run: the cells of ``tests/parity.py``."""

import pytest

from tests import parity
from tests.toy_samples import write_samples

STEPS = 4
"""One in the warm-up of two, and an evaluation after each half: what is compared has moved enough to show an error."""
MOVES_SLOWLY = "latent attention, experts, 1 further token"

# Each dimension, each model and each bug that was found once; the others are run by hand and by ``make parity``.
IN_CI = {
    "dense": (
        "TP2+SP, full recomputation",
        "PP2, 1 layer in the first stage",
        "PP2+VP2",
        "PP2+VP3, embedding and loss count as layers",
        "CP2, all-gather",
        "CP2, all-to-all",
        "CP2, ring",
        "CP4, all-to-all within 2 and ring",
        "DP2",
        "DP2, distributed optimizer, overlapped reduce and gather",
        "PP2+VP2 x DP2, distributed optimizer, overlapped",
        "DP4, hybrid sharding",
        "DP2, FSDP2",
        "TP2+SP x DP2, FSDP2",
        "DP2, Megatron-FSDP of state and gradients",
        "TP2+SP x DP2, Megatron-FSDP",
        "PP2+VP2 x DP2, Megatron-FSDP",
    ),
    "dense, tied embeddings": ("PP2+VP2", "PP2+VP2 x DP2, FSDP2", "TP2+SP x PP2"),
    "dense, means of microbatches": ("CP2, all-gather", "DP2, average in collective"),
    "dense, 3 layers": ("PP2, embedding counts as a layer", "PP2, loss counts as a layer"),
    "experts": (
        "TP2+SP x EP2, ETP1",
        "PP2+VP2",
        "CP2 x EP2",
        "DP2, distributed optimizer",
        "TP2+SP x DP2, EP2+ETP2",
        "PP2 x EP2",
        "EP2 x DP4, FSDP2",
        "EP2 x DP4, Megatron-FSDP",
        "DP2, Megatron-FSDP",
    ),
    "norms of heads": ("TP2",),
    "norms across heads": ("TP2",),
    "latent attention, experts, 1 further token": ("TP2+SP",),
    "2 further tokens": ("PP2, stages Ettt and tmmL", "CP2, all-gather"),
    "packed": ("TP2+SP", "CP2, all-gather", "CP2, ring", "DP2, distributed optimizer"),
    "padding-free": ("PP2+VP2", "CP2, all-to-all"),
    "packed, experts": ("EP2",),
    "dropout of hidden states": ("TP2, full recomputation",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def singles(folder):
    made = parity.Singles(folder)
    yield made
    made.close()


@pytest.fixture
def pools(request):
    """The pool for a number of processes, started when it is first used."""
    return lambda size: request.getfixturevalue({2: "two_workers", 4: "four_workers"}[size])


def steps_of(model):
    return parity.STEPS if model == MOVES_SLOWLY else STEPS


def as_tests(cells):
    """The cells as parameters; those that are not in CI are slow."""
    assert IN_CI.keys() <= parity.MODELS.keys()
    assert {(model, layout) for model, layouts in IN_CI.items() for layout in layouts} <= set(cells)
    return [
        pytest.param(
            model, layout, marks=() if layout in IN_CI.get(model, ()) else pytest.mark.slow
        )
        for model, layout in cells
    ]


def check(figures, tolerance):
    assert not figures.beyond(tolerance), figures.beyond(tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "layout"), as_tests([*parity.cells()]))
def test_equals_the_single_process(pools, singles, folder, model, layout):
    pool = pools(parity.LAYOUTS[layout].processes)
    figures = parity.measure(pool, singles, model, layout, folder, steps=steps_of(model))
    check(figures, parity.MODELS[model].tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("model", parity.MODELS)
def test_what_is_compared_has_moved(singles, model):
    """Each weight by twenty times what layouts may differ by: a gradient that is a tenth too large would show."""
    record = singles(model, steps=steps_of(model))
    assert len(record.losses) == steps_of(model)
    assert min(parity.moved(record).values()) > 20 * parity.MODELS[model].tolerance.weights
    assert max(record.grad_norms) > 0.1


# Where every rank computes what the single process computes, only the order of sums over ranks differs.
SAME_ARITHMETIC = [
    layout
    for layout in parity.CELLS["dense"]
    if layout.startswith(("PP2", "DP2")) and "x" not in layout
]
EXACT_IN_CI = (
    "PP2, selective recomputation",
    "PP2+VP2",
    "DP2, distributed optimizer, overlapped reduce and gather",
)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout in EXACT_IN_CI else pytest.mark.slow)
        for layout in SAME_ARITHMETIC
    ],
)
def test_bf16_is_exact_where_the_arithmetic_is_the_same(two_workers, singles, folder, layout):
    """Without clipping: the norm is a sum in another order, and its last bit, through the clipping coefficient,
    turns into whole bf16 steps of some weights (losses then differ by 2e-5 to 5e-5)."""
    options = {"steps": STEPS, "precision": "bf16_mixed", "lr": 1e-2, "clip_grad": 0.0}
    figures = parity.measure(two_workers, singles, "dense", layout, folder, **options)
    check(figures, parity.Figures(losses=0, held_out=0, further=0, grad_norms=2e-7, weights=0))


# Sums over ranks are rounded to bf16 (steps of 7.8e-3) where one process rounds once: a weight differs by a step.
BF16 = parity.Figures(losses=2e-4, held_out=2e-4, further=0, grad_norms=3e-3, weights=8e-3)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout, marks=() if layout in ("TP2+SP", "CP2, all-gather") else pytest.mark.slow
        )
        for layout in parity.CELLS["dense"]
        if layout not in SAME_ARITHMETIC
    ],
)
def test_bf16(pools, singles, folder, layout):
    options = {"steps": STEPS, "precision": "bf16_mixed", "lr": 1e-3}
    pool = pools(parity.LAYOUTS[layout].processes)
    check(parity.measure(pool, singles, "dense", layout, folder, **options), BF16)
