# SPDX-License-Identifier: Apache-2.0
"""Training on rewards against a plain loop over transformers' model, any layout against one process, and resume."""

import json

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import PromptDatasetConfig
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    GRPOConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from megatron.bridge.training.grpo import grpo
from megatron.bridge.training.reinforcement.callback import Rollouts
from megatron.bridge.utils.errors import UserError
from tests.toy_run import SEQUENCE, VOCABULARY, save_llama, toy_config
from tests.workers import forget_model_parallel, leave

PROMPTS, GROUP, LENGTH = 10, 4, 7
STEPS, RATE, EPSILON = 4, 2e-4, 1e-6
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
LAYOUTS = {
    "dp2": {},
    "tp2": TP2,
    "sp2": {**TP2, "sequence_parallel": True},
    "pp2": PP2,
    "vp2": {**PP2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
EXPERTS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": SEQUENCE,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
DENSE = {
    name: value for name, value in EXPERTS.items() if "experts" not in name and "moe" not in name
} | {"num_hidden_layers": 4, "vocab_size": VOCABULARY + 8}  # more than the tokenizer has
REWARDS = {"reward_funcs": [f"{__name__}:odd_share", f"{__name__}:close_to"]}


def odd_share(completion_ids, **_):
    return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]


def close_to(completion_ids, answer, **_):
    """None for every fifth answer, which it cannot judge."""
    return [
        None if number % 5 == 4 else -abs(tokens[0] - number) / VOCABULARY
        for tokens, number in zip(completion_ids, answer, strict=True)
    ]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The model, its reference, and the prompts."""
    root = tmp_path_factory.mktemp("rewards")
    like_the_toy = {"rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    sizes = {"num_hidden_layers": 4, "initializer_range": 0.15, **like_the_toy}
    save_llama(root / "model", **sizes)
    torch.manual_seed(1)
    save_llama(root / "other", **sizes, num_key_value_heads=4)
    torch.manual_seed(2)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).save_pretrained(root / "experts")
    Qwen3ForCausalLM(Qwen3Config(**DENSE)).save_pretrained(root / "dense")
    lines = [
        {"prompt": " ".join(str((7 * i + j) % 90) for j in range(3 + i % 3)) + " ", "answer": i}
        for i in range(PROMPTS)
    ]
    (root / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


class Watch(Callback):
    """The losses of each step, and the completions that it trains on."""

    def __init__(self):
        self.steps = []
        self.rollouts = []

    def on_train_step_start(self, context):
        (own,) = [entry for entry in context.callbacks if isinstance(entry, Rollouts)]
        place = own._steps % own._settings.steps_per_generation
        self.rollouts.append(own._steps_rollouts(context)[place].rollouts)

    def on_train_step_end(self, context):
        timed = "rollout tokens/s"
        losses = {name: loss.item() for name, loss in context.loss_dict.items() if name != timed}
        self.steps.append(losses | {"grad norm": float(context.grad_norm)})


def config_of(
    root,
    settings,
    layout=None,
    peft=None,
    micro=2,
    save=None,
    steps=STEPS,
    model="model",
    precision="fp32",
):
    layout = dict(layout or {})
    config = toy_config(
        **{block: layout.pop(block) for block in ("dist", "ddp") if block in layout},
        model=layout,
        train={"train_iters": steps, "global_batch_size": 8, "micro_batch_size": micro},
        dataset=PromptDatasetConfig(dataset_root=str(root), seq_length=SEQUENCE),
        optimizer=OptimizerConfig(lr=RATE, weight_decay=0.0, clip_grad=0.0, adam_eps=EPSILON),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(
            pretrained_checkpoint=str(root / model), **({} if save is None else {"save": save})
        ),
        grpo=GRPOConfig(
            **REWARDS | {"num_generations": GROUP, "max_completion_length": LENGTH} | settings
        ),
        peft=peft,
    )
    config.mixed_precision = precision
    if model in ("experts", "dense"):
        config.model = AutoBridge.from_hf_pretrained(root / model).to_megatron_provider(
            load_weights=False
        )
        config.model.seq_length = SEQUENCE
        for name, value in layout.items():
            setattr(config.model, name, value)
    return config


def run(root, settings, **options):
    watch = Watch()
    callbacks = options.pop("callbacks", [])
    try:
        finished = grpo(config_of(root, settings, **options), [watch, *callbacks])
        watch.weights = [
            part.detach().clone() for chunk in finished.model for part in chunk.parameters()
        ]
    finally:
        forget_model_parallel()
    return watch


def alone(*arguments, **options):
    torch.set_num_threads(1)
    watch = run(*arguments, **options)
    leave()
    return watch


def log_probs(model, rollout, temperature):
    ids = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
    logits = (model(ids).logits / temperature).log_softmax(-1)[0, :-1]
    every = logits.gather(1, ids[0, 1:, None])[:, 0]
    return every[len(rollout.prompt_tokens) - 1 :]


def naive_losses(root, watched, settings, reference="other"):
    """Adam on the completions of ``watched``, one by one, with the published formulas of ``grpo`` and ``k3``."""
    model, frozen = (
        AutoModelForCausalLM.from_pretrained(root / name) for name in ("model", reference)
    )
    optimizer = torch.optim.Adam(model.parameters(), RATE, (0.9, 0.999), EPSILON)
    temperature = settings.get("temperature", 1.0)
    old, losses = {}, []
    for rollouts in watched.rollouts:
        parts = []
        for rollout in rollouts:
            now = log_probs(model, rollout, temperature)
            with torch.no_grad():
                theirs = log_probs(frozen, rollout, temperature)
            before = old.setdefault(id(rollout), now.detach())
            ratio = (now - before).exp()
            clipped = ratio.clamp(0.8, 1.2)
            surrogate = torch.min(ratio * rollout.advantage, clipped * rollout.advantage)
            kl = (theirs - now).exp() - (theirs - now) - 1
            parts.append((settings["beta"] * kl * ratio - surrogate).mean())
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_are_those_of_a_plain_loop(places, temperature):
    """Each generation is used twice, so that the ratio differs from 1."""
    settings = {
        "loss_type": "grpo",
        "beta": 0.1,
        "num_iterations": 2,
        "temperature": temperature,
        "reference": str(places / "other"),
    }
    watch = alone(places, settings)
    found = [step["grpo loss"] for step in watch.steps]
    assert found == pytest.approx(naive_losses(places, watch, settings), abs=2e-6, rel=1e-4)
    assert len(set(found)) == STEPS
    assert watch.rollouts[0] is not watch.rollouts[2]
    assert [rollout.tokens for rollout in watch.rollouts[0]] == [
        rollout.tokens for rollout in watch.rollouts[1]
    ]


def test_rewards_become_advantages(places):
    """Of the first generation, recomputed from the completions and the functions alone."""
    watch = alone(places, {"reward_weights": [1.0, 2.0]}, steps=1)
    answers = {
        tuple(map(int, json.loads(line)["prompt"].split())): json.loads(line)["answer"]
        for line in (places / "training.jsonl").read_text().splitlines()
    }
    groups = {}
    for rollout in watch.rollouts[0]:
        answer = answers[tuple(rollout.prompt_tokens)]
        reward = odd_share([rollout.tokens])[0]
        reward += 2 * (close_to([rollout.tokens], [answer])[0] or 0.0)
        groups.setdefault(answer, []).append((reward, rollout.advantage))
    assert len(groups) == 2
    for group in groups.values():
        rewards, advantages = (torch.tensor(part) for part in zip(*group, strict=True))
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    assert watch.steps[0]["reward"] == pytest.approx(
        sum(reward for group in groups.values() for reward, _ in group) / 8, abs=1e-6
    )


class Evaluations(Callback):
    """What each evaluation reports."""

    def __init__(self):
        self.reports = []

    def on_eval_end(self, context):
        report = {name: value.item() for name, value in context.total_loss_dict.items()}
        self.reports.append((context.progress.step, report))


def held_out(root, folder, eval_iters, layout=None):
    """Greedy completions, so that random numbers do not matter."""
    watch = Evaluations()
    settings = {"top_k": 1} | ({"num_generations_eval": 1} if eval_iters else {})
    config = config_of(root, settings, layout=layout)
    config.dataset.dataset_root = str(folder)
    config.validation = ValidationConfig(eval_interval=2, eval_iters=eval_iters)
    steps = Watch()
    try:
        grpo(config, [watch, steps])
    finally:
        forget_model_parallel()
    return watch.reports, steps.steps


def test_rewards_of_held_out_prompts(places, tmp_path, two_workers):
    """They are those of transformers' greedy completions, and an evaluation does not change the run."""
    lines = [{"prompt": f"{3 * index} {index + 1} ", "answer": index} for index in range(3)]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "training.jsonl").write_text((places / "training.jsonl").read_text())
    reports, steps = held_out(places, tmp_path, 1)
    leave()
    assert [step for step, _ in reports] == [2, 4]
    assert steps == held_out(places, tmp_path, 0)[1]
    leave()
    two = two_workers.run(held_out, places, tmp_path, 1, {"tensor_model_parallel_size": 2})
    for found, _ in two:
        for (_, report), (_, expected) in zip(found, reports, strict=True):
            assert report == pytest.approx(expected, abs=1e-6)
    model = AutoModelForCausalLM.from_pretrained(places / "model")
    untrained = config_of(places, {"top_k": 1, "num_generations_eval": 1})
    untrained.dataset.dataset_root = str(tmp_path)
    untrained.validation = ValidationConfig(eval_iters=1)
    untrained.train.train_iters = 1
    untrained.optimizer.lr = untrained.optimizer.min_lr = 1e-12
    watch = Evaluations()
    grpo(untrained, [watch])
    leave()
    completions = []
    for line in lines:
        ids = torch.tensor([[int(word) for word in line["prompt"].split()]])
        mask = torch.ones_like(ids)
        written = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=LENGTH, eos_token_id=None
        )
        completions.append(written[0, ids.size(1) :].tolist())
    shares = odd_share(completions)
    distances = close_to(completions, [line["answer"] for line in lines])
    (_, report) = watch.reports[-1]
    assert report["reward odd_share"] == pytest.approx(sum(shares) / 3, abs=1e-6)
    assert report["reward close_to"] == pytest.approx(sum(distances) / 3, abs=1e-6)


def all_layouts(root, settings, layouts, peft):
    adapters = LoRA(dim=4) if peft else None
    return {
        name: run(root, settings, layout=LAYOUTS[name], peft=adapters).steps for name in layouts
    }


SEQUENCE_LEVEL = {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 3e-4}


@pytest.mark.parametrize(
    ("settings", "peft", "layouts"),
    [
        ({"beta": 0.1, "num_iterations": 2}, False, tuple(LAYOUTS)),
        ({**SEQUENCE_LEVEL, "beta": 0.1}, True, ("sp2", "pp2", "vp2", "cp2")),
        ({"loss_type": "vespo", "num_iterations": 2}, False, ("cp2",)),
    ],
    ids=["token", "sequence, lora", "vespo"],
)
def test_two_processes(places, two_workers, settings, peft, layouts):
    """Without adapters, the reference is a second model."""
    if not peft and settings.get("beta"):
        settings = {**settings, "reference": str(places / "other")}
    expected = alone(places, settings, peft=LoRA(dim=4) if peft else None).steps
    for rank in two_workers.run(all_layouts, places, settings, layouts, peft):
        for name, steps in rank.items():
            for found, wanted in zip(steps, expected, strict=True):
                assert found == pytest.approx(wanted, rel=2e-5, abs=4e-6), name


def with_experts(root, layout):
    return run(root, {"num_iterations": 2}, layout=layout, model="experts").steps


def test_experts_on_two_processes(places, two_workers):
    expected = alone(places, {"num_iterations": 2}, model="experts").steps
    for steps in two_workers.run(with_experts, places, {"expert_model_parallel_size": 2}):
        for found, wanted in zip(steps, expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-5, abs=4e-6)


class StopAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_step_end(self, context):
        if context.progress.step == self.step:
            context.stop_reason = "the test stops here"


SHARED = {
    "num_iterations": 2,
    "steps_per_generation": 2,
    "beta": 0.1,
    "dynamic_sampling": True,
    "importance_sampling_correction": True,
}


REPLAYED = {
    "num_iterations": 2,
    "steps_per_generation": 2,
    "beta": 0.1,
    "exact_rollout": True,
    "router_replay": True,
}


def stopped(root, folder, *stops, settings=SHARED, model="model"):
    """The steps of a run that stops, and is started again, at each of ``stops``."""
    options = {"model": model, "save": str(folder), "steps": 6}
    watches = [run(root, settings, callbacks=[StopAfter(stop)], **options) for stop in stops]
    return [step for watch in watches for step in watch.steps], watches[-1].weights


@pytest.mark.parametrize(("settings", "model"), [(SHARED, "model"), (REPLAYED, "experts")])
def test_resume_is_exact(places, tmp_path, settings, model):
    """Within a generation, of which the checkpoint has the completions, and at its end."""
    torch.set_num_threads(1)
    options = {"settings": settings, "model": model}
    expected, weights = stopped(places, tmp_path / "one", 6, **options)
    found, resumed = stopped(places, tmp_path / "three", 1, 4, 6, **options)
    leave()
    assert found == expected
    assert all(map(torch.equal, resumed, weights))


def test_resume_in_another_layout(places, tmp_path, two_workers):
    torch.set_num_threads(1)
    expected, _ = stopped(places, tmp_path / "one", 6)
    first, _ = stopped(places, tmp_path / "run", 3)
    leave()
    for rest, _ in two_workers.run(stopped, places, tmp_path / "run", 6):
        for found, wanted in zip([*first, *rest], expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-5, abs=4e-6)


def test_a_failing_reward_function_is_named_with_its_sample(places):
    def score(completions, answer, **_):
        return [1 / (number - 3) for number in answer]

    config = config_of(places, {"reward_funcs": []}, steps=5)
    with pytest.raises(UserError) as refusal:
        grpo(config, reward_funcs=[score])
    forget_model_parallel()
    leave()
    words = ("training.jsonl:4", "score", "ZeroDivisionError")
    assert all(word in str(refusal.value) for word in words)


def test_truncated_completions_can_be_left_out(places):
    """And groups without a signal are replaced by those of further prompts."""
    only_end = {"reward_funcs": [f"{__name__}:ends_early"], "num_generations": 8}
    watch = alone(
        places, {**only_end, "mask_truncated_completions": True, "dynamic_sampling": True}
    )
    for rollouts in watch.rollouts:
        assert {rollout.is_trained for rollout in rollouts} == {True, False}
        for rollout in rollouts:
            assert rollout.is_trained == (rollout.tokens[-1] == VOCABULARY - 1)
    plain = alone(places, only_end)
    assert min(step["groups without signal"] for step in plain.steps) < 1
    assert max(step["groups without signal"] for step in plain.steps) == 1


def ends_early(completion_ids, **_):
    return [float(len(tokens) < LENGTH) for tokens in completion_ids]


EXACT = {"exact_rollout": True, "num_iterations": 2, "epsilon": 0.0}
PRECISIONS = ["fp32", "bf16_mixed"]


def assert_exact(watch):
    """The engine's log-probabilities are those of training. With epsilon 0, every ratio other than 1 is clipped."""
    for step in watch.steps[::2]:
        assert step["sampler mismatch"] == step["sampler mismatch max"] == 0.0
        assert step["clipped low"] == step["clipped high"] == 0.0
    assert any(step["clipped low"] + step["clipped high"] > 0 for step in watch.steps[1::2])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_ratio_of_the_first_step_is_exactly_one(places, model, precision):
    exact = alone(places, EXACT, model=model, precision=precision)
    assert_exact(exact)
    for rollouts in exact.rollouts:
        for rollout in rollouts:
            assert torch.equal(rollout.old_log_probs, rollout.sampler_log_probs)
    usual = alone(
        places, {**EXACT, "exact_rollout": False}, model=model, precision=precision, steps=1
    )
    limit = 1e-4 if precision == "fp32" else 0.2
    assert 0 < usual.steps[0]["sampler mismatch"] < usual.steps[0]["sampler mismatch max"] < limit
    assert usual.rollouts[0][0].tokens == exact.rollouts[0][0].tokens
    tolerance = 1e-3 if precision == "fp32" else 0.1
    assert exact.steps[0]["grad norm"] == pytest.approx(usual.steps[0]["grad norm"], rel=tolerance)


def test_a_reference_with_the_same_weights_has_no_divergence(places):
    settings = {**EXACT, "beta": 0.1}
    for peft in (None, LoRA(dim=4)):
        watch = alone(places, settings, model="dense", precision="bf16_mixed", peft=peft, steps=2)
        assert watch.steps[0]["kl"] == 0.0
        assert watch.steps[1]["kl"] > 0.0


def exact_in_layouts(root, layouts):
    """Runs of a dense model in each layout, and of one with experts under expert parallelism."""
    watches = [run(root, EXACT, layout=LAYOUTS[name], model="dense") for name in layouts]
    replayed = {**EXACT, "router_replay": True}
    expert_parallel = {"expert_model_parallel_size": 2}
    watches.append(run(root, replayed, layout=expert_parallel, model="experts"))
    return [watch.steps for watch in watches]


def test_exact_on_two_processes(places, two_workers):
    """Losses are those of one process, too; every layout has numbers of its own, which are exact in this layout."""
    layouts = ("dp2", "tp2", "sp2", "pp2", "vp2")
    dense = alone(places, EXACT, model="dense").steps
    experts = alone(places, {**EXACT, "router_replay": True}, model="experts").steps
    expected = [dense] * len(layouts) + [experts]
    for rank in two_workers.run(exact_in_layouts, places, layouts):
        for name, steps, wanted in zip([*layouts, "ep2"], rank, expected, strict=True):
            for found in steps[::2]:
                assert found["sampler mismatch max"] == 0.0, name
                assert found["clipped low"] == found["clipped high"] == 0.0, name
            assert steps[0] == pytest.approx(wanted[0], rel=2e-5, abs=4e-6), name


class OtherRouters(Callback):
    """Records what routers choose, and gives them other weights after the first step."""

    def __init__(self):
        self.chosen = []  # of each step, of each pass of a layer: bool [rows, experts]

    def on_train_start(self, context):
        for chunk in context.model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self.record)

    def record(self, module, inputs, output):
        if torch.is_grad_enabled():
            self.chosen[-1].append(output[1])

    def on_train_step_start(self, context):
        self.chosen.append([])
        if context.progress.step == 1:
            for chunk in context.model:
                for name, weight in chunk.named_parameters():
                    if name.endswith("router.weight"):
                        weight.data.neg_()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_experts_of_the_rollout_are_replayed(places, exact, replay):
    """In the second step on a generation, routers whose weights changed sign still choose them."""
    routers = OtherRouters()
    settings = {"exact_rollout": exact, "router_replay": replay, "num_iterations": 2}
    watch = alone(places, settings, model="experts", steps=2, callbacks=[routers])
    if not replay:
        first, second = (torch.cat(maps) for maps in routers.chosen)
        assert not torch.equal(first, second)
        assert all(rollout.experts is None for rollout in watch.rollouts[0])
        return
    layers = EXPERTS["num_hidden_layers"]
    for rollouts, maps in zip(watch.rollouts, routers.chosen, strict=True):
        for index, chosen in enumerate(maps):
            row = 0
            for rollout in rollouts[index // layers * 2 :][:2]:  # of this microbatch
                experts = rollout.experts[:, index % layers].long()
                assert len(experts) == len(rollout.prompt_tokens) + len(rollout.tokens) - 1
                expected = torch.zeros(len(experts), 4).scatter(1, experts, 1.0).bool()
                assert torch.equal(chosen[row : row + len(experts)], expected)
                row += len(experts)  # the last token is not computed
            assert row == len(chosen)


REPLAY = {"router_replay": True, "num_iterations": 2}


def replay_with_other_routers(root, layout=None):
    """Two steps on one generation, the second one with routers that would choose other experts."""
    start = run if layout else alone
    options = {"layout": layout} if layout else {}
    return start(
        root, REPLAY, model="experts", steps=2, callbacks=[OtherRouters()], **options
    ).steps


def test_context_parallel_ranks_replay_their_parts(places, two_workers):
    expected = replay_with_other_routers(places)
    for rank in two_workers.run(replay_with_other_routers, places, LAYOUTS["cp2"]):
        for found, wanted in zip(rank, expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-5, abs=4e-6)
