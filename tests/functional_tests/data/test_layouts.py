# SPDX-License-Identifier: Apache-2.0
"""Indexed datasets built and read by several ranks: every layout sees the single process' global batches."""

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bridge.data.config import GPTDatasetConfig
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer

VOCAB, BATCH, STEPS = 5000, 8, 6


def draw(config, micro, dp_rank, dp_size, consumed, steps):
    """Tokens of ``steps`` global batches as one rank gets them: [step, microbatch, micro, seq]."""
    sizes = (STEPS * BATCH, 2 * BATCH, 0)
    iterators = build_iterators(
        config, NullTokenizer(VOCAB), sizes, micro, BATCH, dp_rank, dp_size, consumed
    )
    train, valid = iterators.train, iterators.valid
    count = BATCH // (micro * dp_size)
    drawn = [torch.stack([next(train)["tokens"] for _ in range(count)]) for _ in range(steps)]
    return torch.stack(drawn), next(valid)["tokens"]


def draw_in_layout(config, micro, layout, consumed, steps):
    """The same inside a worker, with its data-parallel rank in ``layout``, and that rank."""
    parallel_state.initialize_model_parallel(**layout)
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    return rank, *draw(config, micro, rank, size, consumed, steps)


@pytest.fixture
def config(tmp_path):
    """A blend of two corpora that have to be repeated, with a cache that is empty at first."""
    rng = np.random.default_rng(0)
    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    for prefix in prefixes:
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
        for length in rng.integers(5, 60, 20):
            builder.add_document(rng.integers(0, VOCAB, length), [length])
        builder.finalize(prefix + ".idx")
    cache = str(tmp_path / "cache")
    return GPTDatasetConfig(
        seq_length=32, blend=(prefixes, [3.0, 1.0]), split="90,10", path_to_cache=cache
    )


def check(pool, config, micro, layout):
    """Ranks together draw what one process draws, from the start and after a resume."""
    for consumed, steps in ((0, STEPS), (2 * BATCH, 2)):
        results = pool.run(draw_in_layout, config, micro, layout, consumed, steps)
        expected, _ = draw(config, 1, 0, 1, consumed, steps)
        by_rank = {
            rank: tokens for rank, tokens, _ in sorted(results, key=lambda result: result[0])
        }
        for rank, tokens, _ in results:  # ranks of one data-parallel rank agree
            assert torch.equal(tokens, by_rank[rank])
        together = torch.stack(
            list(by_rank.values()), dim=2
        )  # [step, microbatch, rank, micro, seq]
        assert torch.equal(together.flatten(1, 3), expected.flatten(1, 2))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=["dp2", "tp2", "pp2", "cp2"],
)
def test_two_ranks_draw_the_batches_of_one(two_workers, config, layout):
    check(two_workers, config, 2, layout)


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}], ids=["dp4", "tp2dp2"])
def test_four_ranks_draw_the_batches_of_one(four_workers, config, layout):
    check(four_workers, config, 1, layout)
