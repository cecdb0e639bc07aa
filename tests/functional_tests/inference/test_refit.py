# SPDX-License-Identifier: Apache-2.0
"""Refit between processes: transformers here receives from all layouts, two ranks receive from here."""

import threading
from multiprocessing.connection import Client, Listener

import pytest
import torch

from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.refit.canary import Canary
from megatron.bridge.inference.refit.remote import RemoteReceiver, receive_weights
from megatron.bridge.inference.refit.replacement import BucketReader
from megatron.bridge.inference.refit.sender import Refit, send_weights
from megatron.bridge.inference.refit.steps import Finish
from megatron.bridge.inference.refit.stream import WeightStream
from megatron.bridge.inference.refit.transformers import TransformersReceiver
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_refit import PROMPTS, Trainer, answers, fresh_answers


def send_to_one_who_refuses(case, layout):
    """The error of rank 0 does not leave the other rank alone."""
    bridge, chunks = harness.build(case, layout)
    stream = WeightStream(bridge, chunks)

    def refuse(_):
        raise UserError("no")

    if torch.distributed.get_rank() == 0:
        with pytest.raises(UserError, match="no"):
            send_weights(stream, refuse)
    else:
        send_weights(stream, None)
    return len(list(stream))


def test_ranks_stay_together_after_an_error(two_workers, family_case):
    counts = two_workers.run(send_to_one_who_refuses, family_case("llama_tied"), "tp2", timeout=200)
    assert counts[0] == counts[1] > 0


def send(case, layout, address):
    """On each rank of a trainer; rank 0 talks with the receiver. What was sent, and what a plain export says."""
    bridge, chunks = harness.build(case, layout)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(1.5)
    stream = WeightStream(bridge, chunks, bucket_bytes=90_000)
    if torch.distributed.get_rank():
        send_weights(stream, None, 50_000)
        list(stream)
        return None
    with Client(address) as connection:
        report = send_weights(stream, RemoteReceiver(connection), 50_000)
    return report.bytes, {name: weight.clone() for name, weight in stream}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama_tied", "tp2"), ("llama_tied", "pp2"), ("qwen3_moe", "ep2"), ("qwen3_moe", "tp2")],
)
def test_transformers_in_another_process(two_workers, family_case, tmp_path, name, layout):
    case = family_case(name)
    model = harness.hf_model(case.row)
    address = str(tmp_path / "socket")
    with Listener(address) as listener:

        def receive():
            with listener.accept() as connection:
                receive_weights(connection, BucketReader(TransformersReceiver(model)))

        thread = threading.Thread(target=receive)
        thread.start()
        (sent, expected), _ = two_workers.run(send, case, layout, address)
        thread.join()
    assert sent == sum(weight.nbytes for weight in expected.values())  # each byte once
    model.save_pretrained(tmp_path / "saved")
    found = harness.read_weights(tmp_path / "saved")
    for tensor, weight in expected.items():
        torch.testing.assert_close(found[tensor], weight, atol=0, rtol=0)


def test_what_transformers_stores_otherwise_is_named(family_case):
    case = family_case("qwen3_moe")
    bridge, chunks = harness.build(case, "one")
    infos = WeightStream(bridge, chunks).metadata()
    receiver = TransformersReceiver(harness.hf_model(case.row))
    with pytest.raises(UserError, match=r"lack model\.norm"):
        receiver.begin([info for info in infos if info.name != "model.norm.weight"])
    with pytest.raises(UserError, match=r"besides"):
        receiver.begin([*infos, type(infos[0])("model.extra.weight", (3,), torch.float32)])
    receiver.begin(infos)
    with pytest.raises(UserError, match=r"ended before"):
        receiver.finish()


def test_two_ranks_receive(model_dir, tmp_path):  # noqa: F811
    torch.manual_seed(0)
    trainer = Trainer(model_dir)
    with LLM(str(model_dir), tp=2, dtype="float32", kv_memory=1 << 24, chunk=16) as llm:
        refit = Refit(llm, trainer.stream, trainer.chunks, Canary(PROMPTS), 30_000)
        for pattern in ("", "layers.0"):
            trainer.step(pattern)
            assert refit(changed_only=True).difference < 1e-4
        found = answers(llm)
        with pytest.raises(UserError, match="order"):
            llm.replace_weights(Finish())
        assert llm.generate(PROMPTS, Sampling(max_new_tokens=2))[0][0].weight_versions == [2, 2]
    expected = fresh_answers(trainer, tmp_path / "export")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
