# SPDX-License-Identifier: Apache-2.0
"""A search against all layouts of a small grid."""

from dataclasses import replace

import pytest

from megatron.bridge.autotune.reserve import Reserve
from megatron.bridge.autotune.search.candidate import Candidate
from megatron.bridge.autotune.search.search import Search
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured


def searched(family, gigabytes, **values):
    config = configured(provider(family, 8, **values)).resolve(8).config
    config.model.cuda_graph_impl = "local"  # toys would wait for the CPU, whatever the layout
    search = Search(
        config, 8, "H100 80GB", int(gigabytes * 1e9), {"micro_batch": 1}, switches=False
    )
    search.pricer.reserve = lambda *_: Reserve({}, 0.0)  # a hundred times what toys need
    return search


@pytest.mark.parametrize(
    ("family", "gigabytes"), [("llama", 1.0), ("llama", 0.022), ("qwen3_moe", 1.0)]
)
def test_the_best_of_all_layouts_is_found(family, gigabytes):
    search = searched(family, gigabytes)
    blocks = [
        ("full", "block", layers, None) for layers in range(1, search.config.model.num_layers)
    ]
    every = [
        price
        for candidate in search.space.candidates()
        if not search.problems(candidate)
        for recompute in (*search.recomputes, *blocks)
        if (price := search.price(replace(candidate, recompute=recompute)))
        and price.fullest <= search.budget
    ]
    assert search.run(1).best[0].seconds <= 1.01 * min(price.seconds for price in every)


def test_no_more_layers_are_recomputed_than_must_be():
    search = searched("llama", 0.022)
    best = search.run(1).best[0].candidate
    *kind, layers, modules = best.recompute
    assert (kind, modules) == (["full", "block"], None)
    fewer = replace(best, recompute=(*kind, layers - 1, None))
    assert max(search.pricer.memory(fewer)) > search.budget


def test_a_layout_shards_the_optimizer_as_a_run_does():
    search = searched("llama", 1.0)
    assert search.pricer.configured(Candidate()).ddp.use_distributed_optimizer
    assert not search.pricer.configured(Candidate(tensor=8)).ddp.use_distributed_optimizer
    search.config.optimizer.optimizer = "muon"
    search.config.ddp.use_distributed_optimizer = False
    assert not search.pricer.configured(Candidate()).ddp.use_distributed_optimizer
