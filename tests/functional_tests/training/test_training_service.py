# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge serve --train``: what clients get is what transformers and peft compute, whoever else trains."""

import math

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.bridge.cli.main import main
from megatron.bridge.inference.requests import Completion, Sampling
from megatron.bridge.training.adapter_trainer import AdamSettings, RowResult
from megatron.bridge.training.service.checkpoints import Checkpoints
from megatron.bridge.training.service.commands import (
    AddModel,
    Compute,
    Done,
    ExportModel,
    Sample,
    Step,
)
from megatron.bridge.training.service.ranks import ServiceLoop, ServiceModel
from megatron.bridge.training.service.service import Service
from megatron.bridge.training.step.row_losses import TrainingRow
from tests.toy_adapters import DECODER, make
from tests.toy_models import make_llama
from tests.training_service import (
    HAS_SERVER,
    Client,
    RefusedError,
    datum,
    started_service,
)
from tests.workers import forget_model_parallel

pytestmark = pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")

TOKENS = [list(range(3, 14)), [7, 50, 9, 50, 60, 3, 88]]
SAMPLED = [[-4.5 + 0.1 * index for index in range(10)], [-4.0 - 0.2 * index for index in range(6)]]
ADVANTAGES = [[1.0, -1.0] * 5, [0.5] * 6]
PROMPT = [5, 9, 11, 2]


def plain_data():
    return [datum(TOKENS[0], weights=[0.0, *[1.0] * 9]), datum(TOKENS[1])]


def policy_data():
    return [
        datum(tokens, logprobs=sampled, advantages=advantages)
        for tokens, sampled, advantages in zip(TOKENS, SAMPLED, ADVANTAGES, strict=True)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    make("llama", directory)
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def address(base, root):
    with started_service(base, root, "--max-adapters", "20") as made:
        yield made


def folder_of(root, path):
    model, kind, name = path.removeprefix("tinker://").split("/")
    return root / model.replace(":", "-") / kind / name


def load_in_peft(base, folder, **options):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder, **options)


def logprobs_in_peft(model, tokens):
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


# the losses as https://tinker-docs.thinkingmachines.ai defines them, of log-probabilities p and q and advantages a
LOSSES = {
    "importance_sampling": (lambda p, q, a: -((p - q).exp() * a).sum(), {}),
    "ppo": (
        lambda p, q, a: -torch.min((p - q).exp() * a, (p - q).exp().clamp(0.9, 1.05) * a).sum(),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    ),
    "cispo": (lambda p, q, a: -((p - q).exp().clamp(0.8, 1.2).detach() * p * a).sum(), {}),
    "dro": (lambda p, q, a: -(p * a - 0.5 * 0.3 * (p - q) ** 2).sum(), {"beta": 0.3}),
}


def test_training_is_that_of_a_plain_loop_with_peft(address, base, root):
    client = Client(address)
    model = client.create(rank=4)
    start = model.save_for_sampler("start")
    plain = load_in_peft(base, folder_of(root, start), is_trainable=True)
    trained = [value for value in plain.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)
    for loss_name in ("cross_entropy", *LOSSES):
        expected = [logprobs_in_peft(plain, tokens) for tokens in TOKENS]
        if loss_name == "cross_entropy":
            loss = -expected[0][1:].sum() - expected[1].sum()
            found = model.forward_backward(plain_data())
        else:
            compute, config = LOSSES[loss_name]
            columns = zip(expected, SAMPLED, ADVANTAGES, strict=True)
            loss = sum(compute(p, torch.tensor(q), torch.tensor(a)) for p, q, a in columns)
            found = model.forward_backward(policy_data(), loss_name, **config)
        for row, expected_row in zip(found, expected, strict=True):
            assert row == pytest.approx(expected_row.tolist(), abs=1e-5), loss_name
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([value.grad.norm() for value in trained]).norm()
        optimizer.step()
        assert model.step(learning_rate=3e-3, weight_decay=0.1) == pytest.approx(
            float(norm), rel=1e-4
        ), loss_name
    for row, tokens in zip(model.forward(plain_data()), TOKENS, strict=True):
        assert row == pytest.approx(logprobs_in_peft(plain, tokens).tolist(), abs=1e-5)


def train(model, steps, data=None):
    """All numbers of some steps."""
    numbers = []
    for _ in range(steps):
        numbers.append(model.forward_backward(data or plain_data()))
        numbers.append(model.step(grad_clip_norm=1.0))
    return numbers


def test_a_client_reaches_no_other(address):
    quiet = Client(address).create(rank=4)
    expected = train(quiet, 4)

    careful = Client(address).create(rank=4)
    client = Client(address)
    reckless = client.create(rank=8, seed=2)
    numbers = train(careful, 1)
    nan = datum(TOKENS[0], weights=[math.nan] * 10)
    with pytest.raises(RefusedError, match=r"data\[1\]: .*weights has a number that is not finite"):
        reckless.forward_backward([plain_data()[0], nan])
    with pytest.raises(RefusedError, match="id outside the vocabulary"):
        reckless.forward_backward([datum([1, 10**6, 5])])
    numbers += train(careful, 1)
    # its ratio overflows; both clients' rows are computed at the same time
    overflow = [datum(TOKENS[0], logprobs=[-1e30] * 10, advantages=[1.0] * 10)]
    broken = [reckless.send_data(overflow, "importance_sampling") for _ in range(3)]
    numbers += train(careful, 1)
    for answer in broken:
        assert client.wait(answer)["metrics"]["loss:sum"] is None
    with pytest.raises(RefusedError, match="the norm of the gradient is nan"):
        reckless.step()
    numbers += train(careful, 1)
    for found, wanted in zip(numbers, expected, strict=True):
        if isinstance(wanted, float):
            assert found == pytest.approx(wanted, rel=1e-5)
        else:
            for row, wanted_row in zip(found, wanted, strict=True):
                assert row == pytest.approx(wanted_row, abs=1e-5)


def test_training_goes_on_bitwise_after_a_restart(base, tmp_path):
    with started_service(base, tmp_path) as address:
        model = Client(address).create(rank=4)
        train(model, 2)
        path = model.save("middle", user_metadata={"step": "2"})
        expected = train(model, 2)
        with pytest.raises(RefusedError, match=f"{path} exists.*overwrite=true"):
            model.save("middle")
        assert model.save("end") != path
        train(model, 1)
        assert model.save("end", overwrite=True).endswith("/weights/end")
    with started_service(base, tmp_path) as address:
        client = Client(address)
        facts = client.post("weights_info", {"tinker_path": path})
        trained = [facts[f"train_{layers}"] for layers in ("attn", "mlp", "unembed")]
        assert (facts["base_model"], facts["lora_rank"], trained) == ("toy", 4, [True] * 3)
        assert train(client.load(path, optimizer=True), 2) == expected
        # in place of what another model has learned
        other = client.create(rank=8, seed=5)
        train(other, 1)
        other.call("load_weights", {"path": path, "optimizer": True})
        assert train(other, 2) == expected
        fresh = train(client.load(path, optimizer=False), 2)
        assert fresh[:2] == expected[:2]
        assert fresh[2] != expected[2]


def test_samples_are_those_of_transformers_and_peft(address, base, root):
    client = Client(address)
    model = client.create(rank=4)
    train(model, 3)
    path = model.save_for_sampler("sampled")
    answer = model.call("save_weights_for_sampler", {"sampling_session_seq_id": 0})
    train(model, 1)  # changes no sampler
    plain = load_in_peft(base, folder_of(root, path))
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(plain(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected = logprobs_in_peft(plain, tokens).tolist()
    for sampler in (client.sampler(path), answer["sampling_session_id"]):
        options = {"temperature": 0.0, "prompt_logprobs": True, "topk_sample_logprobs": 2}
        found = client.sample(sampler, PROMPT, max_tokens=6, **options)
        (sequence,) = found["sequences"]
        assert sequence["tokens"] == tokens[4:]
        assert sequence["stop_reason"] == "length"
        assert sequence["logprobs"] == pytest.approx(expected[3:], abs=1e-4)
        assert found["prompt_logprobs"][0] is None
        assert found["prompt_logprobs"][1:] == pytest.approx(expected[:3], abs=1e-4)
        best = [position[0][0] for position in sequence["topk_logprobs"]]
        assert best == tokens[4:]
        stopped = client.sample(
            sampler, PROMPT, number=1, max_tokens=6, temperature=0.0, stop=[tokens[6]]
        )["sequences"][0]
        assert (stopped["tokens"], stopped["stop_reason"]) == (tokens[4:7], "stop")
    facts = client.fetch(f"samplers/{client.sampler(path)}")[1]
    assert path.encode() in facts
    untrained = client.sample(client.sampler(), PROMPT, max_tokens=6, temperature=0.0)
    assert untrained["sequences"][0]["tokens"] != tokens[4:]


def test_seeds_and_several_samples(address):
    client = Client(address)
    sampler = client.sampler()
    first = client.sample(sampler, PROMPT, 0, count=3, max_tokens=5, seed=7)["sequences"]
    again = client.sample(sampler, PROMPT, 1, count=3, max_tokens=5, seed=7)["sequences"]
    other = client.sample(sampler, PROMPT, 2, count=3, max_tokens=5, seed=8)["sequences"]
    assert first == again
    assert first != other
    assert len({tuple(sequence["tokens"]) for sequence in first}) == 3


def test_requests_run_in_the_order_of_their_numbers(address):
    client = Client(address)
    expected = train(client.create(rank=4), 1)
    model = client.create(rank=4)
    model.number = 1
    step = model.send("optim_step", {"adam_params": {"learning_rate": 1e-2, "eps": 1e-2}})
    model.number = 0
    data = model.send_data(plain_data())
    model.number = 0
    assert model.send_data(plain_data()) == data  # sent twice, computed once
    numbers = [output["logprobs"]["data"] for output in client.wait(data)["loss_fn_outputs"]]
    assert numbers == expected[0]
    assert client.wait(step)["metrics"]["grad_norm"] == pytest.approx(expected[1], rel=1e-6)
    # a wrong request takes its turn
    model.number = 2
    with pytest.raises(RefusedError, match="loss_fn='mse'"):
        model.forward_backward(plain_data(), "mse")
    assert model.forward(plain_data())


def test_wrong_requests_are_refused_by_name(address):
    client = Client(address)
    model = client.create(rank=4)
    assert client.warning is None
    two_targets = datum(TOKENS[0])
    two_targets["loss_fn_inputs"]["target_tokens"] |= {"shape": [5, 2]}
    image = datum(TOKENS[0])
    image["model_input"]["chunks"].append({"type": "image", "data": "", "format": "png"})
    no_targets = {**datum(TOKENS[0]), "loss_fn_inputs": {}}
    rows = {
        "loss_fn_inputs.mask: cross_entropy uses target_tokens, weights": [
            datum(TOKENS[0], mask=[1.0] * 10)
        ],
        r"target_tokens has shape \[5, 2\]: several targets": [two_targets],
        "target_tokens is missing": [no_targets],
        "type='image': this server takes text only": [image],
        "weights has 3 entries: give one for each of 10 tokens": [
            datum(TOKENS[0], weights=[1.0] * 3)
        ],
        "tokens has 70 entries: a row has 1 to 64": [datum([1] * 71)],
        "data is empty": [],
    }
    for message, data in rows.items():
        with pytest.raises(RefusedError, match=message):
            model.forward_backward(data)
    with pytest.raises(RefusedError, match=r"loss_fn_inputs\.logprobs is missing: ppo needs"):
        model.forward_backward(plain_data()[1:], "ppo")
    with pytest.raises(
        RefusedError, match=r"loss_fn_config\.epsilon=0\.2: ppo has clip_low_threshold"
    ):
        model.forward_backward(policy_data(), "ppo", epsilon=0.2)
    with pytest.raises(RefusedError, match=r"adam_params: momentum=0.5 is not supported"):
        model.step(momentum=0.5)
    with pytest.raises(RefusedError, match=r"beta1=1.5: must be below 1"):
        model.step(beta1=1.5)
    with pytest.raises(RefusedError, match=r"name '\.\./up'"):
        model.save("../up")
    with pytest.raises(RefusedError, match="kind='inflight'"):
        model.call("save_weights_for_sampler", {"sampling_session_seq_id": 9, "kind": "inflight"})
    for path in ("tinker://../weights/x", "tinker://a/weights/../../x", "/etc"):
        with pytest.raises(RefusedError, match=r"tinker://|name"):
            client.load(path, optimizer=False)
    with pytest.raises(RefusedError, match="save_weights_for_sampler is already"):
        model.call("save_weights_external", {"path": "other"})
    sampler = model.save_for_sampler("refused")
    with pytest.raises(RefusedError, match="sampler_weights: give weights"):
        client.load(sampler, optimizer=False)
    model_body = {"session_id": client.session, "model_seq_id": 50, "lora_config": {"rank": 4}}
    with pytest.raises(RefusedError, match="base_model='other': this server has toy"):
        client.call("create_model", {**model_body, "base_model": "other"})
    with pytest.raises(RefusedError, match="train_attn=true"):
        client.create(train_attn=False, train_mlp=False, train_unembed=False)
    sample_body = {"prompt": {"chunks": []}, "sampling_params": {}, "base_model": "toy"}
    with pytest.raises(RefusedError, match="prompt_alt_tokens_k=2 is not supported"):
        client.call("asample", {**sample_body, "prompt_alt_tokens_k": 2})
    with pytest.raises(RefusedError, match="max_new_tokens=100 exceed the context of 64"):
        client.sample(client.sampler(), PROMPT, max_tokens=100)
    assert model.forward(plain_data())


def test_a_finished_session_takes_its_models_with_it(address, root):
    client = Client(address)
    model = client.create(rank=4)
    model.save_for_sampler("kept")
    model.call("save_weights_for_sampler", {"sampling_session_seq_id": 3})
    folder = folder_of(root, f"tinker://{model.id}/sampler_weights/kept").parent
    assert (folder / "ephemeral-3").is_dir()
    assert client.fetch(f"sessions/{client.session}/finish", {})[0] == 204
    with pytest.raises(RefusedError, match="does not exist"):
        model.forward(plain_data())
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["kept"]


@pytest.mark.parametrize("layout", [("--tp", "2"), ("--dp", "2")])
def test_layouts_over_http_and_a_key(base, tmp_path, layout, address):
    expected = train(Client(address).create(rank=4), 2)
    key = "tml-0123456789abcdef"
    with started_service(base, tmp_path, *layout, MEGATRON_BRIDGE_API_KEY=key) as other_address:
        with pytest.raises(RefusedError, match="API key"):
            Client(other_address)
        client = Client(other_address, key)
        model = client.create(rank=4)
        for found, wanted in zip(train(model, 2), expected, strict=True):
            if isinstance(wanted, float):
                assert found == pytest.approx(wanted, rel=1e-5)
            else:
                for row, wanted_row in zip(found, wanted, strict=True):
                    assert row == pytest.approx(wanted_row, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dp", "2"], ["--dp 2", "--train DIR"]),
        (["--micro-batch-size", "2"], ["--micro-batch-size 2", "--train DIR"]),
        (["--train", "DIR", "--adapter-root", "DIR"], ["--adapter-root", "no effect with --train"]),
        (["--train", "DIR", "--request-timeout", "9"], ["--request-timeout 9", "no effect"]),
        (["--train", "FILE"], ["--train FILE is a file"]),
        (["--train", "DIR", "--host", "0.0.0.0"], ["--api-key-file"]),
        (["--train", "DIR", "--max-context", "65"], ["--max-context 65", "from 2 to 64"]),
    ],
)
def test_options_without_effect_are_refused(base, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    (tmp_path / "FILE").touch()
    assert main(["serve", str(base), "--port", "0", *options]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
}
EXPERT_LAYOUTS = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
}


def run_commands(directory, scratch, layouts):
    """For each layout, what two models learn in shared passes, and what is sampled from one of them."""
    found = {}
    for name, layout in layouts.items():
        service = ServiceModel(
            directory, sizes=layout, dtype="float32", kv_memory=1 << 24, micro_batch_size=2
        )
        loop = ServiceLoop(service)
        (facts,) = service.yield_facts()
        targets = [*facts.layers.attention, *facts.layers.mlp, *facts.layers.output]
        events = loop.apply([AddModel(0, "a", 4, 8.0, 1, targets)])
        events += loop.apply([AddModel(1, "b", 2, 8.0, 2, targets[:2])])
        for step in range(3):
            rows = [
                TrainingRow(model, tokens[:-1], tokens[1:])
                for model in ("a", "b")
                for tokens in TOKENS[: 1 + step % 2]
            ]
            settings = AdamSettings(learning_rate=3e-3, eps=1e-2)
            events += loop.apply(
                [
                    Compute(10 * step + 2, "a", [row for row in rows if row.adapter == "a"], False),
                    Step(10 * step + 4, "a", settings),
                    Compute(10 * step + 3, "b", [row for row in rows if row.adapter == "b"], False),
                    Step(10 * step + 5, "b", settings),
                ]
            )
        events += loop.apply([ExportModel(30, "a", f"{scratch}/{name}")])
        for number, adapter in enumerate((None, "a")):
            sampling = Sampling(
                max_new_tokens=5, adapter_name=adapter, logprobs=0, ignore_eos=True, n=2
            )
            folder = None if adapter is None else f"{scratch}/{name}"
            events += loop.apply([Sample(40 + number, PROMPT, sampling, folder)])
        while loop.is_busy:
            events += loop.step()
        found[name] = {event.id: event.value for event in events}
        service.close()
        forget_model_parallel()
    return found


def check_same(found, expected):
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5)
    elif isinstance(expected, RowResult):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    elif isinstance(expected, Completion):
        assert found.tokens == expected.tokens
    elif isinstance(expected, list):
        for item, expected_item in zip(found, expected, strict=True):
            check_same(item, expected_item)


@pytest.mark.parametrize(("kind", "layouts"), [("llama", LAYOUTS), ("qwen3_moe", EXPERT_LAYOUTS)])
def test_layouts_compute_what_one_process_does(kind, layouts, tmp_path, two_workers):
    directory = tmp_path / kind
    make(kind, directory)
    expected = run_commands(str(directory), tmp_path / "alone", {"one": {}})["one"]
    assert len(expected) == 2 + 12 + 1 + 2
    for outcome in two_workers.run(run_commands, str(directory), str(tmp_path), layouts):
        for name in layouts:
            assert outcome[name].keys() == expected.keys()
            for number, value in expected.items():
                check_same(outcome[name][number], value)


def test_layers_without_adapters_are_named(tmp_path):
    make("qwen3_moe", tmp_path / "experts")
    make_llama(**DECODER, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    words = {
        "experts": ["experts", "q_proj", "output_layer"],
        "tied": ["train_unembed", "mlp.down_proj"],
    }
    for name, expected in words.items():
        model = ServiceModel(str(tmp_path / name), sizes={}, kv_memory=1 << 24)
        (facts,) = model.yield_facts()
        service = Service("toy", "path", facts, Checkpoints(tmp_path / "saved"), 1, 1.0)
        warning = service.create_session()["warning_message"]
        assert all(word in warning for word in expected), warning
        assert ("output_layer" in warning) == (name == "experts")
        model.close()
        forget_model_parallel()


def test_samplers_make_room_for_others(base, tmp_path):
    model = ServiceModel(str(base), sizes={}, dtype="float32", kv_memory=1 << 24, max_adapters=1)
    loop = ServiceLoop(model)
    events = loop.apply([AddModel(0, "a", 4, 8.0, 1, ["q_proj"])])
    row = TrainingRow("a", TOKENS[0][:-1], TOKENS[0][1:])
    for step in range(2):
        events += loop.apply([ExportModel(0, "a", f"{tmp_path}/{step}")])
        events += loop.apply([Compute(0, "a", [row], False), Step(0, "a", AdamSettings(0.05))])
    assert all(isinstance(event, Done) for event in events)

    def sampling(step):
        return Sampling(max_new_tokens=4, adapter_name=str(step), ignore_eos=True)

    def sample(*steps):
        commands = [Sample(step, PROMPT, sampling(step), f"{tmp_path}/{step}") for step in steps]
        events = loop.apply(commands)
        while loop.is_busy:
            events += loop.step()
        return {event.id: event.value[0].tokens for event in events}

    alone = {**sample(0), **sample(1)}
    assert alone[0] != alone[1]
    assert sample(0, 1) == alone
    assert sample(1, 0) == alone
    (refused,) = loop.apply([AddModel(5, "b", 4, 8.0, 1, ["q_proj"])])
    assert "--max-adapters 1" in refused.message
    # training and sampling have one copy of the base
    pointers = [
        {
            name: value.data_ptr()
            for name, value in chunk.named_parameters()
            if ".adapter." not in name
        }
        for chunk in (model.trainer._chunks[0], model.engine._state.bare[0])
    ]
    assert pointers[0] == pointers[1]
    model.close()
    forget_model_parallel()


def test_a_base_in_bfloat16_learns_and_samples_what_it_has_learned(base, tmp_path):
    model = ServiceModel(str(base), sizes={}, dtype="bfloat16", kv_memory=1 << 24)
    loop = ServiceLoop(model)
    (facts,) = model.yield_facts()
    loop.apply([AddModel(0, "a", 4, 32.0, 1, facts.layers.attention + facts.layers.output)])
    row = TrainingRow("a", TOKENS[0][:-1], TOKENS[0][1:])
    losses = []
    for _ in range(30):
        done, _ = loop.apply([Compute(0, "a", [row], False), Step(0, "a", AdamSettings(0.02))])
        losses.append(done.value[0].loss)
    assert losses[-1] < losses[0] / 20
    loop.apply([ExportModel(0, "a", f"{tmp_path}/a")])
    sampling = Sampling(max_new_tokens=5, adapter_name="a", ignore_eos=True)
    events = loop.apply([Sample(1, TOKENS[0][:4], sampling, f"{tmp_path}/a")])
    while loop.is_busy:
        events += loop.step()
    assert events[0].value[0].tokens == TOKENS[0][4:9]
    model.close()
    forget_model_parallel()
