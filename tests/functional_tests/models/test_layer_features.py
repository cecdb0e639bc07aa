# SPDX-License-Identifier: Apache-2.0
"""Features of layers across layouts: through a Megatron checkpoint, and under context parallelism."""

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from tests.families import harness


def import_checkpoint(case, megatron, layout):
    bridge, model = harness.build(case, layout)
    bridge.save_megatron_model(model, megatron)


def export_checkpoint(case, megatron, output, layout):
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    model = bridge.load_megatron_model(
        megatron, mp_overrides=harness.LAYOUTS[layout], wrap_with_ddp=False
    )
    bridge.save_hf_pretrained(model, output, show_progress=False)
    return harness.different_files(case, output)


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), ("pp2", "sp2")])
@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_through_a_megatron_checkpoint(two_workers, family_case, tmp_path, name, first, second):
    case = family_case(name)
    two_workers.run(import_checkpoint, case, tmp_path / "megatron", first)
    found = two_workers.run(
        export_checkpoint, case, tmp_path / "megatron", tmp_path / "out", second
    )
    assert found == [[], []]


def logits_of_my_chunks(case):
    """This rank's positions of the text, and its logits there."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    provider.context_parallel_size = 2
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    rank, ids = parallel_state.get_context_parallel_rank(), case.batch[0]
    parts = torch.arange(ids.shape[1]).chunk(4)
    mine = torch.cat([parts[rank], parts[3 - rank]])
    with torch.no_grad():
        return mine, chunk(ids[:, mine], mine.expand(len(ids), -1), None)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_context_parallel(two_workers, family_case, name):
    case = family_case(name)
    found = torch.empty_like(case.logits)
    for positions, logits in two_workers.run(logits_of_my_chunks, case):
        found[:, positions] = logits
    assert not harness.different_logits(case.logits, found)
