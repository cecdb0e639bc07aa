# SPDX-License-Identifier: Apache-2.0
"""Refit between processes: transformers here receives from all layouts, two ranks receive from here."""

import multiprocessing
import shutil
import threading
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.refit.canary import Canary
from megatron.bridge.inference.refit.group import broadcast_weights, join_group
from megatron.bridge.inference.refit.replacement import (
    BucketReader,
    Finish,
    RemoteReceiver,
    receive_weights,
)
from megatron.bridge.inference.refit.sender import Refit, send_weights
from megatron.bridge.inference.refit.stream import WeightInfo, WeightStream
from megatron.bridge.inference.refit.transformers import TransformersReceiver
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_refit import PROMPTS, Trainer, answers, fresh_answers
from tests.workers import free_port


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
    ("pool", "name", "layout"),
    [
        ("two_workers", "llama_tied", "tp2"),
        ("two_workers", "llama_tied", "pp2"),
        ("two_workers", "qwen3_moe", "ep2"),
        (
            "four_workers",
            "qwen3_moe",
            "tp2pp2ep2",
        ),  # experts of the last stage take two hops to rank 0
    ],
)
def test_transformers_in_another_process(request, pool, family_case, tmp_path, name, layout):
    workers = request.getfixturevalue(pool)
    case = family_case(name)
    model = harness.hf_model(case.row)
    address = str(tmp_path / "socket")
    with Listener(address) as listener:

        def receive():
            with listener.accept() as connection:
                receive_weights(connection, BucketReader(TransformersReceiver(model)))

        thread = threading.Thread(target=receive)
        thread.start()
        (sent, expected), *_ = workers.run(send, case, layout, address)
        thread.join()
    assert sent == sum(weight.nbytes for weight in expected.values())  # each byte once
    model.save_pretrained(tmp_path / "saved")
    found = harness.read_weights(tmp_path / "saved")
    for tensor, weight in expected.items():
        torch.testing.assert_close(found[tensor], weight, atol=0, rtol=0)


TRAINERS = {
    "one": ("two_workers", "one"),
    "tp2": ("two_workers", "tp2"),
    "pp2": ("two_workers", "pp2"),
    "ep2": ("two_workers", "ep2"),
    "tp2pp2": ("four_workers", "tp2pp2"),
}
ENGINES = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_any_layout_to_any_other(request, family_case, tmp_path, engine):
    """From each layout the engine gets what an engine reads from an export, bit by bit."""
    case = family_case("qwen3_moe")
    options = {**ENGINES[engine], "dtype": "float32", "kv_memory": 1 << 24, "chunk": 16}
    bridge, chunks = harness.build(case, "one")
    back = WeightStream(bridge, chunks)
    _, trained = harness.build(case, "one")
    with torch.no_grad():
        for parameter in trained[0].parameters():
            parameter.mul_(1.5)
    bridge.save_hf_pretrained(trained, tmp_path / "saved", show_progress=False)
    for source, name in ((case.checkpoint, "base"), (tmp_path / "saved", "export")):
        shutil.copytree(
            source, tmp_path / name, ignore=shutil.ignore_patterns("tokenizer*")
        )  # a stub of one
    with LLM(str(tmp_path / "export"), **options) as llm:
        expected = answers(llm)
    with LLM(str(tmp_path / "base"), **options) as llm:
        before = answers(llm)
        assert before != expected
        for name, (pool, layout) in TRAINERS.items():
            address = str(tmp_path / name)
            with Listener(address) as listener:

                def receive(listener=listener):
                    with listener.accept() as connection:
                        receive_weights(connection, SimpleNamespace(take=llm.replace_weights))

                thread = threading.Thread(target=receive)
                thread.start()
                request.getfixturevalue(pool).run(send, case, layout, address)
                thread.join()
            assert answers(llm) == expected, name
            send_weights(back, llm.replace_weights)
            assert answers(llm) == before


def test_what_transformers_stores_otherwise_is_named(family_case):
    case = family_case("qwen3_moe")
    bridge, chunks = harness.build(case, "one")
    infos = WeightStream(bridge, chunks).metadata()
    receiver = TransformersReceiver(harness.hf_model(case.row))
    with pytest.raises(UserError, match=r"lack model\.norm"):
        receiver.begin([info for info in infos if info.name != "model.norm.weight"])
    with pytest.raises(UserError, match=r"model\.extra\.weight"):
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


# ---- engines of other projects ----------------------------------------------------------------------------------


def send_over_group(case, layout, port, address, api):
    """Rank 0 is in a group with a process that receives as an engine does, told of each call by socket."""
    bridge, chunks = harness.build(case, layout)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(1.5)
    stream = WeightStream(bridge, chunks)
    if torch.distributed.get_rank():
        broadcast_weights(stream, None, None, api, 50_000)
        list(stream)
        return None
    with Client(address) as connection:
        group = join_group("127.0.0.1", port, world_size=2, backend="gloo")

        def call(keywords):
            connection.send(keywords)
            return lambda: None

        report = broadcast_weights(stream, group, call, api, 50_000)
        connection.send(None)
    torch.distributed.destroy_process_group(group)
    return report.bytes, {name: weight.clone() for name, weight in stream}


def buckets_of_an_engine(update):
    """As vLLM and SGLang divide what one call announces: [(name, shape, dtype)] of each broadcast."""
    dtypes = update.get("dtype_names") or update["dtypes"]
    limit = update.get("packed_buffer_size_bytes", float("inf"))
    bucket, size = [], 0
    for name, dtype, shape in zip(update["names"], dtypes, update["shapes"], strict=True):
        bucket.append((name, shape, getattr(torch, dtype)))
        size += torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        if size > limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def receive_as_engine(case, port, address, folder):
    """A process of its own, with a model of transformers that loads what is broadcast."""
    model = harness.hf_model(case.row)
    with Listener(address) as listener:
        Path(f"{address}.ready").touch()
        with listener.accept() as connection:
            group = join_group("127.0.0.1", port, world_size=2, rank=1, backend="gloo")
            receiver = TransformersReceiver(model)
            while (update := connection.recv()) is not None:
                for bucket in buckets_of_an_engine(update):
                    sizes = [
                        torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in bucket
                    ]
                    flat = torch.empty(sum(sizes), dtype=torch.uint8)
                    torch.distributed.broadcast(flat, 0, group=group)
                    receiver.begin(
                        [WeightInfo(name, tuple(shape), dtype) for name, shape, dtype in bucket],
                        True,
                    )
                    for (name, shape, dtype), part in zip(bucket, flat.split(sizes), strict=True):
                        receiver.receive(name, part.view(dtype).view(shape))
                    receiver.finish()
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "layout", "api"),
    [
        ("llama_tied", "tp2", "vllm"),
        pytest.param("llama_tied", "pp2", "sglang", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "ep2", "vllm", marks=pytest.mark.slow),
    ],
)
def test_an_engine_in_a_group(two_workers, family_case, tmp_path, name, layout, api):
    case = family_case(name)
    address, port = str(tmp_path / "socket"), free_port()
    arguments = (case, port, address, tmp_path / "saved")
    engine = multiprocessing.get_context("spawn").Process(target=receive_as_engine, args=arguments)
    engine.start()
    while not Path(f"{address}.ready").exists():
        assert engine.is_alive()
        time.sleep(0.05)
    (sent, expected), _ = two_workers.run(send_over_group, case, layout, port, address, api)
    engine.join()
    assert sent == sum(weight.nbytes for weight in expected.values())
    found = harness.read_weights(tmp_path / "saved")
    for tensor, weight in expected.items():
        torch.testing.assert_close(found[tensor], weight, atol=0, rtol=0)
