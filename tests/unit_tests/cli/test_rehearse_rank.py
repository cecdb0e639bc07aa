# SPDX-License-Identifier: Apache-2.0
"""One rank of a large job: its place, its parameters and its samples, counted by hand."""

import json

import pytest
import torch
import torch.distributed as dist

from megatron.bridge.backends.cpu.without_memory import one_rank
from megatron.bridge.cli.main import main
from tests.workers import leave

RECIPE = (
    "--recipe",
    "llama32_1b_pretrain_config",
    "train.global_batch_size=4096",
    "model.vocab_size=32000",
)
LAYOUT = ("model.tensor_model_parallel_size=4", "model.pipeline_model_parallel_size=2")


@pytest.fixture(autouse=True)
def _alone():
    leave()
    yield
    leave()


def parts(text):
    setup = ("process groups", "model chunks", "conversion plan", "optimizer", "data position")
    names = (*setup, "checkpoint state", "checkpoint plan", "step")
    found = {name: line for line in text.splitlines() for name in names if line.startswith(name)}
    assert tuple(found) == names
    return found


def test_one_rank_of_four_thousand(capsys, tmp_path):
    # rank 2077 = 1 + 4 * (7 + 512 * 1): tensor rank 1, data rank 7, stage 1
    to = ("--messages", str(tmp_path / "messages.jsonl"))
    assert (
        main(["train", *RECIPE, *LAYOUT, "--rehearse-rank", "2077", "--world-size", "4096", *to])
        == 0
    )
    text = capsys.readouterr().out
    found = parts(text)
    assert "tensor 1, pipeline 1, context 0, expert 0, data 7" in found["process groups"]
    hidden, ffn, layers, heads, groups, rows = 2048, 8192, 8, 2048, 512, 32000
    layer = hidden * (heads + 2 * groups) + heads * hidden + 3 * hidden * ffn
    count = (layers * layer + rows * hidden) / 4 + (
        2 * layers + 1
    ) * hidden  # norms are whole on each rank
    assert f"{count / 1e9:.2f} billion parameters" in found["model chunks"]
    assert (
        "8 of 4096 samples of a step, first 7, last 3591" in found["data position"]
    )  # 7 + 512 * 7
    # of each layer: queries, keys, values, gate and up are apart on the other side; the last stage has the last norm
    assert f"{layers * 9 + 2} tensors of the checkpoint" in found["conversion plan"]
    assert "4 of 8 microbatches" in found["step"]
    messages = [json.loads(line) for line in (tmp_path / "messages.jsonl").read_text().splitlines()]
    assert f"{len(messages):,} messages" in found["step"]
    received = [each for each in messages if each["kind"] == "receive"]
    assert {each["bytes"] for each in received} == {8192 * hidden * 2}
    assert len(received) == 4
    assert "receive, pipeline model parallel" in text
    assert not dist.is_initialized()


def test_other_tensors_have_memory_afterwards():
    with one_rank(3, 64) as traffic:
        assert torch.empty(10, device="cuda").is_meta
        assert torch.empty(10).is_meta
        answers = [None] * 64
        dist.all_gather_object(answers, {"rank": dist.get_rank()})
        assert answers == [{"rank": 3}] * 64
        assert traffic.received > 64
    assert torch.empty(10, device="cuda").device.type == "cpu"
    assert not torch.empty(10).is_meta
