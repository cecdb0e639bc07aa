# SPDX-License-Identifier: Apache-2.0
"""New weights for an engine: the numbers of the trainer, and nothing of the old ones."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.refit import packing
from megatron.bridge.inference.refit.canary import SCORING, Canary
from megatron.bridge.inference.refit.replacement import Begin, Bucket
from megatron.bridge.inference.refit.sender import Refit, send_weights
from megatron.bridge.inference.refit.stream import WeightInfo, WeightStream
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.toy_models import make_llama
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture

BUCKET = 30_000
PROMPTS = [[5, 9, 30, 31, 12], [7, 8]]
GREEDY = Sampling(max_new_tokens=12, logprobs=0, ignore_eos=True)


class Trainer:
    """A live model whose weights can take a step."""

    def __init__(self, directory):
        self.bridge = AutoBridge.from_hf_pretrained(directory)
        self.chunks = self.bridge.to_megatron_model(wrap_with_ddp=False)
        self.stream = WeightStream(self.bridge, self.chunks)

    @torch.no_grad()
    def step(self, pattern="", size=0.05):
        for name, parameter in self.chunks[0].named_parameters():
            if pattern in name:
                parameter.add_(torch.randn(parameter.shape) * size)


@pytest.fixture
def trainer(model_dir):  # noqa: F811
    torch.manual_seed(0)
    return Trainer(model_dir)


@pytest.fixture
def llm(model_dir, trainer):  # noqa: F811
    with LLM(str(model_dir), dtype="float32", kv_memory=1 << 24, chunk=16) as made:
        yield made


def fresh_answers(trainer, directory, prompts=PROMPTS):
    """What an engine generates that was started from an export."""
    trainer.bridge.save_hf_pretrained(trainer.chunks, directory, show_progress=False)
    with LLM(str(directory), dtype="float32", kv_memory=1 << 24, chunk=16) as llm:
        return [(one[0].tokens, one[0].logprobs) for one in llm.generate(prompts, GREEDY)]


def answers(llm, prompts=PROMPTS):
    return [(one[0].tokens, one[0].logprobs) for one in llm.generate(prompts, GREEDY)]


# ---- the stream -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gpt_oss"])
def test_what_is_announced_comes(family_case, name):
    bridge, chunks = harness.build(family_case(name), "one")
    stream = WeightStream(bridge, chunks, bucket_bytes=BUCKET)
    announced = stream.metadata()
    for _ in range(2):  # as often as it is wanted
        found = [WeightInfo(it, tuple(weight.shape), weight.dtype) for it, weight in stream]
        assert found == announced
    whole = dict(bridge.export_hf_weights(chunks, show_progress=False))
    assert {info.name for info in announced} <= whole.keys()
    for it, weight in stream:
        torch.testing.assert_close(weight, whole[it], atol=0, rtol=0)
    half = WeightStream(bridge, chunks, torch.bfloat16)
    assert [info.dtype for info in half.metadata()] == [weight.dtype for _, weight in half]


def test_only_what_changed(trainer):
    stream = trainer.stream
    everything = [info.name for info in stream.metadata()]
    assert [info.name for info in stream.metadata(stream.changed())] == everything
    assert [
        info.name for info in stream.metadata(stream.changed())
    ] == everything  # nothing was sent yet
    stream.mark_sent()
    assert stream.changed() == []
    trainer.step("layers.1.mlp.linear_fc1")
    names = [name for name, _ in stream.send(stream.changed())]
    assert sorted(names) == [f"model.layers.1.mlp.{which}_proj.weight" for which in ("gate", "up")]


SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    )
)


@given(SHAPES, st.integers(1, 2000))
def test_tensors_lie_side_by_side(shapes, limit):
    infos = [
        WeightInfo(str(index), tuple(shape), dtype) for index, (shape, dtype) in enumerate(shapes)
    ]
    buckets = packing.layout(infos, limit)
    assert [slot.info for bucket in buckets for slot in bucket] == infos
    for bucket in buckets:
        assert (
            len(bucket) == 1
            or bucket[-1].stop - bucket[0].start <= limit // 2
            or not bucket[-1].info.bytes
        )
        ends = 0
        for slot in bucket:
            assert slot.start >= ends
            assert slot.start % packing.ALIGNMENT == 0
            ends = slot.stop
    for first, second in itertools.pairwise(buckets):
        assert first[-1].stop <= second[0].start or second[-1].stop <= first[0].start
    largest = max((info.bytes for info in infos), default=0)
    assert (
        packing.buffer_bytes(buckets)
        <= max(limit, limit // 2 + largest, 2 * largest) + 2 * packing.ALIGNMENT
    )
    buffer = torch.zeros(packing.buffer_bytes(buckets), dtype=torch.uint8)
    for bucket in buckets:
        for (_, view), slot in zip(packing.views(buffer, bucket), bucket, strict=True):
            assert (tuple(view.shape), view.dtype) == (slot.info.shape, slot.info.dtype)


# ---- the engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed_only", [False, True])
def test_the_engine_is_one_started_from_an_export(llm, trainer, tmp_path, changed_only):
    refit = Refit(llm, trainer.stream, trainer.chunks, Canary(PROMPTS), BUCKET)
    before = answers(llm)
    for number in range(3):
        trainer.step("layers.1" if number else "")
        report = refit(changed_only)
        assert report.difference < 1e-4
        assert report.tensors == (
            len(trainer.stream.metadata()) if not (changed_only and number) else 9
        )
    after = answers(llm)
    assert after == fresh_answers(trainer, tmp_path / "export")
    assert after != before
    assert llm.generate(PROMPTS, GREEDY)[0][0].weight_versions == [3] * 12


def test_nothing_is_reused_across_a_refit(llm, trainer, tmp_path):
    prompt = [list(range(7, 60))]  # longer than a chunk, so that its caches are kept
    answers(llm, prompt)
    trainer.step()
    send_weights(trainer.stream, llm.replace_weights, BUCKET)
    assert answers(llm, prompt) == fresh_answers(trainer, tmp_path / "export", prompt)


def test_the_trainer_is_as_it_was(llm, trainer):
    trainer.chunks[0].train()
    names = {name: id(parameter) for name, parameter in trainer.chunks[0].named_parameters()}
    Refit(llm, trainer.stream, trainer.chunks, Canary(PROMPTS))()
    assert trainer.chunks[0].training
    assert {
        name: id(parameter) for name, parameter in trainer.chunks[0].named_parameters()
    } == names
    assert all(parameter.numel() for parameter in trainer.chunks[0].parameters())


def scores(llm, canary):
    found = llm.generate(canary.prompts, SCORING)
    return [one.logprob for completions in found for one in completions[0].prompt_logprobs]


def test_the_canary_tells_old_weights(llm, trainer):
    canary = Canary(PROMPTS)
    canary.check(canary.trainer_logprobs(trainer.chunks), scores(llm, canary))
    trainer.step(size=0.05)
    with pytest.raises(UserError, match=r"does not have the weights"):
        canary.check(canary.trainer_logprobs(trainer.chunks), scores(llm, canary))
    quiet = Canary(PROMPTS, tolerance=10.0)  # a step too small for the tolerance
    quiet.check(scores(llm, quiet), scores(llm, quiet))
    with pytest.raises(UserError, match=r"kept its old weights"):
        quiet.check(quiet.trainer_logprobs(trainer.chunks), scores(llm, quiet))


def test_the_canary_tells_nan(llm, trainer):
    canary = Canary(PROMPTS)
    expected = canary.trainer_logprobs(trainer.chunks)
    with pytest.raises(UserError, match=r"nan"):
        canary.check(expected, [float("nan"), *expected[1:]])
    for bad in ([], [[3]]):
        with pytest.raises(UserError, match="two tokens"):
            Canary(bad)


@pytest.mark.parametrize("running", ["abort", "finish", "keep"])
@pytest.mark.parametrize("pack", [False, True])
def test_texts_that_run(trainer, running, pack):
    config = EngineConfig(
        128, trainer.chunks[0].config.vocab_size, kv_memory=1 << 22, max_requests=1, pack=pack
    )
    trainer.chunks[0].eval()
    with Engine(trainer.chunks, config) as engine:
        first, second = (engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS)
        for _ in range(4):
            engine.step()
        with engine.new_weights(running):
            trainer.step()
        list(engine.run())
    tokens, versions = first.completion.tokens, first.completion.weight_versions
    assert len(tokens) == len(versions)
    assert versions == {"abort": [0] * 4, "finish": [0] * 12, "keep": [0] * 4 + [1] * 8}[running]
    assert first.completion.finish_reason == ("cancelled" if running == "abort" else "length")
    if running != "finish":  # the other one waited
        assert second.completion.weight_versions == [1] * 12


def test_what_does_not_fit_is_named(llm, trainer, tmp_path):
    make_llama(tmp_path / "other", num_hidden_layers=1)
    before = answers(llm)
    for directory, words in ((tmp_path / "other", ["lack", "layers.1"]),):
        with pytest.raises(UserError) as caught:
            send_weights(Trainer(directory).stream, llm.replace_weights)
        assert all(word in str(caught.value) for word in words)
    with pytest.raises(UserError, match="order"):
        llm.replace_weights(Bucket(0))
    with pytest.raises(UserError, match="abort"):
        send_weights(trainer.stream, llm.replace_weights, running="wait")
    assert answers(llm) == before


def test_a_sender_that_gives_up_leaves_the_old_weights_in_use(llm, trainer, tmp_path):
    steps = []

    def take(step):
        steps.append(step)
        if len(steps) > 1:
            raise KeyboardInterrupt
        llm.replace_weights(step)

    with pytest.raises(KeyboardInterrupt):
        send_weights(trainer.stream, take, BUCKET)
    assert isinstance(steps[0], Begin)
    assert not steps[0].path.exists()  # nothing is left in shared memory
    send_weights(trainer.stream, llm.replace_weights, BUCKET)
    assert answers(llm) == fresh_answers(trainer, tmp_path / "export")


def test_a_text(llm, trainer):
    trainer.step()
    send_weights(trainer.stream, llm.replace_weights)
    ids = llm.hf.encode(TEXT[0])
    expected = Canary([ids]).trainer_logprobs(trainer.chunks)
    assert [one.logprob for one in llm.logprobs(TEXT[0])[0]] == pytest.approx(expected, abs=1e-4)
