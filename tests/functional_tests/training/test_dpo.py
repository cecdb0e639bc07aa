# SPDX-License-Identifier: Apache-2.0
"""Preference tuning against a plain loop over transformers' model, and any layout against one process."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron.bridge.data.config import PreferenceDatasetConfig
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    DPOConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from megatron.bridge.training.dpo import dpo
from tests.toy_run import SEQUENCE, VOCABULARY, save_llama, toy_config
from tests.workers import forget_model_parallel, leave

LENGTHS = [
    (2, 3, 9),
    (11, 5, 4),
    (1, 7, 2),
    (5, 5, 5),
]  # of the prompts, the chosen and the rejected answers
STEPS, RATE, EPSILON = 3, 2e-4, 1e-6
LOSSES = {
    "sigmoid": DPOConfig(beta=0.4),
    "smoothed": DPOConfig(beta=0.4, label_smoothing=0.2),
    "ipo": DPOConfig(beta=0.4, loss_type="ipo"),
    "hinge": DPOConfig(beta=0.4, loss_type="hinge"),
    "rpo": DPOConfig(beta=0.4, rpo_alpha=0.7),
    "cpo": DPOConfig(beta=0.4, loss_type="cpo", label_smoothing=0.2),
    "simpo": DPOConfig(beta=2.0, loss_type="simpo"),
    "orpo": DPOConfig(beta=0.4, loss_type="orpo"),
}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
LAYOUTS = {
    "dp2": {},
    "sp2": {**TP2, "sequence_parallel": True},
    "pp2": PP2,
    "vp2": {**PP2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "FSDP2": {"dist": DistributedInitConfig(use_torch_fsdp2=True)},
    "Megatron-FSDP": {"ddp": DistributedDataParallelConfig(use_megatron_fsdp=True)},
}
SHARDED_STAGES = {
    f"{stages} {sharding}": {**LAYOUTS[stages], **LAYOUTS[sharding]}
    for stages in ("pp2", "vp2")
    for sharding in ("FSDP2", "Megatron-FSDP")
}
ON_TWO = tuple(LAYOUTS)
LAYOUTS |= SHARDED_STAGES
EOD = VOCABULARY - 1
KTO = {"beta": 0.4, "loss_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5}
DESIRABLE = [True, False, True, True]


def numbers():
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(0, EOD, (length,), generator=generator).tolist() for length in lengths]
        for lengths in LENGTHS
    ]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The model, its reference, and the data."""
    root = tmp_path_factory.mktemp("preferences")
    like_the_toy = {"rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    sizes = {"num_hidden_layers": 4, "initializer_range": 0.15, **like_the_toy}
    save_llama(root / "model", **sizes)
    torch.manual_seed(1)
    save_llama(root / "other", **sizes, num_key_value_heads=4)
    names = ("prompt", "chosen", "rejected")
    rows = [
        dict(zip(names, (" ".join(map(str, part)) + " " for part in pair), strict=True))
        for pair in numbers()
    ]
    (root / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labeled = root / "labeled"
    labeled.mkdir()
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": label}
        for row, label in zip(rows, DESIRABLE, strict=True)
    ]
    (labeled / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


class Losses(Callback):
    def __init__(self):
        self.steps = []

    def on_train_step_end(self, context):
        self.steps.append({name: loss.item() for name, loss in context.loss_dict.items()})


def run(root, settings, layout=None, peft=None, micro=1):
    """The losses of each step, and the trained weights by name on one process."""
    layout = dict(layout or {})
    config = toy_config(
        **{block: layout.pop(block) for block in ("dist", "ddp") if block in layout},
        model=layout,
        train={"train_iters": STEPS, "global_batch_size": len(LENGTHS), "micro_batch_size": micro},
        dataset=PreferenceDatasetConfig(
            dataset_root=str(root / "labeled" if settings.loss_type == "kto" else root),
            seq_length=SEQUENCE,
        ),
        optimizer=OptimizerConfig(lr=RATE, weight_decay=0.0, clip_grad=0.0, adam_eps=EPSILON),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(root / "model")),
        dpo=settings,
        peft=peft,
    )
    losses = Losses()
    try:
        dpo(config, [losses])
    finally:
        forget_model_parallel()
    return losses.steps


def alone(*arguments, **options):
    torch.set_num_threads(1)
    found = run(*arguments, **options)
    leave()
    return found


def log_probs(model, prompt, answer):
    """Of each token of an answer and of the end behind it."""
    ids = torch.tensor([[*prompt, *answer, EOD]])
    logits = model(ids).logits.log_softmax(-1)[0, :-1]
    return logits.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]


def naive_loss(chosen, rejected, settings):
    """The published formulas for one pair; each argument has the log-probabilities of both models."""
    reduce = torch.mean if settings.loss_type in ("ipo", "simpo", "orpo") else torch.sum
    if settings.loss_type in ("cpo", "simpo", "orpo"):
        return naive_reference_free_loss(reduce(chosen[0]), reduce(rejected[0]), settings)
    margin = sum(
        sign * (reduce(ours) - reduce(theirs))
        for sign, (ours, theirs) in ((1, chosen), (-1, rejected))
    )
    if settings.loss_type == "ipo":
        return (margin - 0.5 / settings.beta) ** 2
    if settings.loss_type == "hinge":
        return F.relu(1 - settings.beta * margin)
    share, logit = settings.label_smoothing, settings.beta * margin
    return -(1 - share) * torch.sigmoid(logit).log() - share * torch.sigmoid(-logit).log()


def naive_reference_free_loss(chosen, rejected, settings):
    if settings.loss_type == "orpo":
        odds = [log.exp() / (1 - log.exp()) for log in (chosen, rejected)]
        return -settings.beta * torch.sigmoid((odds[0] / odds[1]).log()).log()
    gamma = settings.simpo_gamma if settings.loss_type == "simpo" else 0.0
    share, logit = settings.label_smoothing, settings.beta * (chosen - rejected) - gamma
    return -(1 - share) * torch.sigmoid(logit).log() - share * torch.sigmoid(-logit).log()


def naive_likelihoods(model, settings):
    """What is added to the loss: of chosen answers, or of texts, over all tokens of the step."""
    is_of_texts = settings.loss_type == "orpo"
    weight = 1.0 if settings.loss_type in ("cpo", "orpo") else settings.rpo_alpha or 0.0
    logs = [
        log_probs(model, prompt[:1], [*prompt[1:], *chosen])
        if is_of_texts
        else log_probs(model, prompt, chosen)
        for prompt, chosen, _ in numbers()
    ]
    return -weight * torch.cat(logs).mean()


def naive_losses(root, reference, settings):
    """Adam on all pairs, one by one."""
    model, frozen = (
        AutoModelForCausalLM.from_pretrained(root / name) for name in ("model", reference)
    )
    optimizer = torch.optim.Adam(model.parameters(), RATE, (0.9, 0.999), EPSILON)
    found = []
    for _ in range(STEPS):
        losses = []
        for prompt, *answers in numbers():
            with torch.no_grad():
                theirs = [log_probs(frozen, prompt, answer) for answer in answers]
            ours = [log_probs(model, prompt, answer) for answer in answers]
            losses.append(naive_loss(*zip(ours, theirs, strict=True), settings))
        loss = torch.stack(losses).mean() + naive_likelihoods(model, settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_a_plain_loop(places, name):
    settings = LOSSES[name]
    expected = naive_losses(places, "other", settings)
    if settings.needs_reference:
        settings = DPOConfig(**{**vars(settings), "reference": str(places / "other")})
    adds_likelihood = settings.likelihood_weight or settings.loss_type == "orpo"
    micro = len(LENGTHS) if adds_likelihood else 2  # likelihoods are means over a microbatch
    found = [step["dpo loss"] for step in alone(places, settings, micro=micro)]
    assert found == pytest.approx(expected, rel=2e-5)
    assert len(set(found)) == STEPS


def test_without_a_reference_the_start_is_it(places):
    settings = LOSSES["sigmoid"]
    steps = alone(places, settings)
    assert [step["dpo loss"] for step in steps] == pytest.approx(
        naive_losses(places, "model", settings), rel=2e-5
    )
    assert steps[0]["reward margin"] == steps[0]["chosen reward"] == 0.0
    assert steps[-1]["reward margin"] > 0
    assert steps[-1]["reward accuracy"] > 0.5


def all_layouts(root, peft, layouts):
    settings = DPOConfig(beta=0.4, reference=None if peft else str(root / "other"))
    return {
        name: run(root, settings, LAYOUTS[name], LoRA(dim=4) if peft else None) for name in layouts
    }


@pytest.mark.parametrize(
    "peft", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_two_processes(places, two_workers, peft):
    """With adapters, each chunk is its own reference."""
    settings = DPOConfig(beta=0.4, reference=None if peft else str(places / "other"))
    expected = alone(places, settings, peft=LoRA(dim=4) if peft else None)
    layouts = ("sp2", "pp2", "vp2", "FSDP2", "Megatron-FSDP") if peft else ON_TWO
    for rank in two_workers.run(all_layouts, places, peft, layouts):
        for name, steps in rank.items():
            for found, wanted in zip(steps, expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6), name


@pytest.mark.parametrize(
    "peft", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_stages_whose_weights_are_sharded(places, four_workers, peft):
    settings = DPOConfig(beta=0.4, reference=None if peft else str(places / "other"))
    expected = alone(places, settings, peft=LoRA(dim=4) if peft else None)
    for rank in four_workers.run(all_layouts, places, peft, tuple(SHARDED_STAGES)):
        for name, steps in rank.items():
            for found, wanted in zip(steps, expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6), name


def reference_free_layouts(root, layouts):
    settings = {name: LOSSES[name] for name in ("orpo", "cpo")}
    return {
        (name, layout): run(root, settings[name], LAYOUTS[layout], micro=2)
        for name in settings
        for layout in layouts
    }


def test_losses_without_a_reference_on_two_processes(places, two_workers):
    """Replicas would have other microbatches, over whose tokens likelihoods are averaged."""
    expected = {name: alone(places, LOSSES[name], micro=2) for name in ("orpo", "cpo")}
    for rank in two_workers.run(reference_free_layouts, places, ("sp2", "pp2", "cp2")):
        for (name, layout), steps in rank.items():
            for found, wanted in zip(steps, expected[name], strict=True):
                assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6), (name, layout)


def in_half_a_row(model, prompt, answer):
    """The log-probability of an answer, cut with its prompt to half of ``dataset.seq_length``."""
    return log_probs(model, prompt, answer)[: SEQUENCE // 2 + 1 - len(prompt)].sum()


def naive_kto_losses(root, settings):
    """Adam on all answers, each beside its prompt with the answer to the next prompt; all share one estimate."""
    model, frozen = (
        AutoModelForCausalLM.from_pretrained(root / name) for name in ("model", "other")
    )
    optimizer = torch.optim.Adam(model.parameters(), RATE, (0.9, 0.999), EPSILON)
    prompts, answers = zip(*[(prompt, chosen) for prompt, chosen, _ in numbers()], strict=True)

    def ratios(of):
        both = list(zip(prompts, of, strict=True))
        with torch.no_grad():
            theirs = [in_half_a_row(frozen, *each) for each in both]
        return torch.stack([in_half_a_row(model, *each) for each in both]) - torch.stack(theirs)

    found = []
    for _ in range(STEPS):
        kl = max(ratios(answers[1:] + answers[:1]).mean().item(), 0.0)
        losses = [
            (1.5 if good else 0.5) * (1 - torch.sigmoid(0.4 * (ratio - kl if good else kl - ratio)))
            for ratio, good in zip(ratios(answers), DESIRABLE, strict=True)
        ]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), kl))
    return found


def test_kto_is_a_plain_loop(places):
    settings = DPOConfig(**KTO, reference=str(places / "other"))
    steps = alone(places, settings, micro=len(DESIRABLE))
    losses, kls = zip(*naive_kto_losses(places, settings), strict=True)
    assert [step["kto loss"] for step in steps] == pytest.approx(losses, rel=2e-5)
    assert [step["kl"] for step in steps] == pytest.approx(kls, rel=2e-5, abs=1e-5)
    assert len(set(losses)) == STEPS


def kto_layouts(root, sizes):
    settings = DPOConfig(**KTO, reference=str(root / "other"))
    return {name: run(root, settings, LAYOUTS[name], micro=micro) for name, micro in sizes.items()}


def test_kto_on_two_processes(places, two_workers):
    """The estimate is of a microbatch of all replicas, so each of two has half of it."""
    expected = alone(places, DPOConfig(**KTO, reference=str(places / "other")), micro=2)
    for rank in two_workers.run(kto_layouts, places, {"dp2": 1, "pp2": 2, "cp2": 2}):
        for name, steps in rank.items():
            for found, wanted in zip(steps, expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6), name
