# SPDX-License-Identifier: Apache-2.0
"""Distillation in one process: against transformers and plain torch, saved, resumed, and refused."""

import json
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import paths
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.pretraining.mock_dataset import MockGPTDataset
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.observe.metrics import Throughput
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, DistillConfig
from megatron.bridge.training.distill import distill
from megatron.bridge.training.distillation.cache_teacher import precompute
from megatron.bridge.training.distillation.student_teacher import pair_of
from megatron.bridge.training.distillation.teacher import teacher_provider
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.optim.optimizer import megatron_optimizers
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.toy_distill import HIDDEN, LEARN, Losses, run_student, save_teacher, student_config
from tests.toy_run import SEQUENCE, VOCABULARY, save_llama, toy_config, whole_weights
from tests.workers import forget_model_parallel

TOP = {**LEARN, "top_k": 8}
BATCH = 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_llama(
        tmp_path_factory.mktemp("models") / "student", num_hidden_layers=4, initializer_range=0.1
    )


@pytest.fixture(autouse=True)
def clean(one_process):
    """No process group is left over."""
    yield
    forget_model_parallel()


def config_from(student, teacher, learn, checkpoint=None, **arguments):
    """A run that starts from the weights of ``student``, in its architecture."""
    checkpoint = checkpoint or CheckpointConfig()
    checkpoint.pretrained_checkpoint = str(student)
    config = student_config(teacher, learn, checkpoint=checkpoint, **arguments)
    config.model = AutoBridge.from_hf_pretrained(str(student)).to_megatron_provider(
        load_weights=False
    )
    config.model.calculate_per_token_loss = True
    return config


class Look(Callback):
    """What a run looks like in its first step."""

    def on_grads_ready(self, context):
        chunk = unwrap(context.model[0])
        self.grads = {
            name: one.main_grad.clone()
            for name, one in chunk.named_parameters()
            if one.requires_grad
        }
        self.weights = {name: one.detach().clone() for name, one in chunk.named_parameters()}
        self.pair = pair_of(chunk)
        self.run = context


def first_step(config):
    look = Look()
    distill(config, [look])
    return look


# --------------------------------------------------------------------------------------- against plain torch


def layer_outputs(model, wanted):
    """Outputs of layers, numbered from 1, as hooks see them."""
    found = {}
    for number in wanted:
        model.model.layers[number - 1].register_forward_hook(
            lambda _module, _inputs, output, number=number: found.__setitem__(
                number, output[0] if isinstance(output, tuple) else output
            )
        )
    return found


def reference(student, teacher, learn, maps):
    """Losses and gradients of the first batch, by the definition, in float64."""
    ours, theirs = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, teacher)
    )
    data = MockGPTDataset(BATCH, SEQUENCE, VOCABULARY, 1234)
    tokens, labels = (
        torch.stack([data[row][key] for row in range(BATCH)]) for key in ("tokens", "labels")
    )
    pairs = learn.get("hidden_layers", {})
    mine, others = layer_outputs(ours, pairs), layer_outputs(theirs, pairs.values())
    logits = ours(tokens).logits
    with torch.no_grad():
        wanted = theirs(tokens).logits
    temperature = learn["temperature"]
    losses = {
        "lm loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        "kl loss": F.kl_div(
            (logits / temperature).log_softmax(-1),
            (wanted / temperature).log_softmax(-1),
            log_target=True,
            reduction="sum",
        )
        / labels.numel(),
    }
    if pairs:
        maps = {layer: weight.double().requires_grad_() for layer, weight in maps.items()}
        losses["hidden loss"] = sum(
            F.mse_loss(mine[layer] @ maps[layer].T, others[other]) for layer, other in pairs.items()
        ) / len(pairs)
    total = (
        learn["ce_weight"] * losses["lm loss"]
        + learn["kl_weight"] * temperature**2 * losses["kl loss"]
        + learn.get("hidden_weight", 0.0) * losses.get("hidden loss", 0.0)
    )
    total.backward()
    grads = {name: one.grad for name, one in ours.named_parameters()}
    return losses, grads | {layer: weight.grad for layer, weight in maps.items() if pairs}


def renamed(look, student):
    """Gradients under transformers' names."""
    chunk = unwrap(look.run.model[0])
    for name, parameter in chunk.named_parameters():
        parameter.data = look.grads[name].clone()
    bridge = AutoBridge.from_hf_pretrained(str(student))
    return {
        name: one.clone() for name, one in bridge.export_hf_weights([chunk], show_progress=False)
    }


def map_name(layer):
    return f"distillation.adapter.{layer}.weight"


@pytest.mark.parametrize("learn", [LEARN, HIDDEN], ids=["logits", "hidden"])
def test_a_step_is_that_of_plain_torch(teacher, student, learn):
    look = first_step(config_from(student, teacher, learn, train={"train_iters": 1}))
    pairs = learn.get("hidden_layers", {})
    maps = {layer: look.weights[map_name(layer)] for layer in pairs}
    losses, expected = reference(student, teacher, learn, maps)
    for name, value in losses.items():
        assert look.run.loss_dict[name].item() == pytest.approx(value.item(), rel=1e-5), name
    found = renamed(look, student) | {layer: look.grads[map_name(layer)] for layer in pairs}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient).norm() / gradient.norm()
        assert error <= 1e-4, f"{name}: {error:.1e}"


@pytest.mark.sampled
def test_a_student_comes_near_its_teacher(teacher):
    for name, learn in {
        "kl loss": {"ce_weight": 0.0, "kl_weight": 1.0},
        "hidden loss": {
            "ce_weight": 0.0,
            "kl_weight": 0.0,
            "hidden_weight": 1.0,
            "hidden_layers": {4: 8},
        },
    }.items():
        _, losses = run_student(teacher, learn, train={"train_iters": 40})
        late = [step[name] for step in losses.train[-10:]]
        assert sum(late) / len(late) < 0.95 * losses.train[0][name]


def test_as_wide_as_the_teacher_nothing_is_mapped(tmp_path):
    same = save_llama(tmp_path / "same", num_hidden_layers=4)
    learn = {
        "ce_weight": 0.0,
        "kl_weight": 1.0,
        "hidden_weight": 1.0,
        "hidden_layers": {2: 2, 4: 4},
    }
    look = first_step(config_from(same, same, learn, train={"train_iters": 1}))
    assert not [name for name in look.weights if "distillation" in name]
    assert look.run.loss_dict["hidden loss"] < 1e-10
    assert look.run.loss_dict["kl loss"].abs() < 1e-6
    assert max(grad.abs().max() for grad in look.grads.values()) < 1e-5


def test_speed_counts_the_teachers_forward_pass(tmp_path):
    """As large as the student, it does a third of the student's work."""
    same = save_llama(tmp_path / "same", num_hidden_layers=4)
    look = first_step(config_from(same, same, LEARN, train={"train_iters": 1}))
    alone = flops_per_token([unwrap(look.run.model[0])], SEQUENCE)
    taught = Throughput(look.run.config, look.run)(tokens_per_second=1e12)
    assert taught["TFLOP/s per process"] == pytest.approx(alone * 4 / 3)


# ------------------------------------------------------------------------------------------------ the teacher


def assert_same_logits(look, teacher):
    data = MockGPTDataset(2, SEQUENCE, VOCABULARY, 7)
    tokens = torch.stack([data[row]["tokens"] for row in range(2)])
    positions = torch.arange(SEQUENCE).expand(2, -1)
    with torch.no_grad():
        found = look.pair.teacher(input_ids=tokens, position_ids=positions, attention_mask=None)
        expected = AutoModelForCausalLM.from_pretrained(teacher)(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_teacher_is_the_checkpoint(teacher):
    assert_same_logits(first_step(student_config(teacher, train={"train_iters": 1})), teacher)


def test_the_teacher_may_be_a_megatron_checkpoint(teacher, tmp_path):
    AutoBridge.import_ckpt(str(teacher), str(tmp_path / "megatron"))
    forget_model_parallel()
    assert_same_logits(
        first_step(student_config(tmp_path / "megatron", train={"train_iters": 1})), teacher
    )


def test_the_teacher_may_be_of_another_family(tmp_path):
    """One with experts, and more layers than the student."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "max_position_embeddings": SEQUENCE,
        "initializer_range": 0.2,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path)
    assert_same_logits(first_step(student_config(tmp_path, train={"train_iters": 1})), tmp_path)


def test_the_teacher_is_neither_trained_nor_saved(teacher, tmp_path):
    from tests.functional_tests.checkpoint.runs import tensors_of

    config = student_config(
        teacher,
        HIDDEN,
        train={"train_iters": 2},
        checkpoint=CheckpointConfig(save=str(tmp_path / "run")),
    )
    look = first_step(config)
    chunk, beside = unwrap(look.run.model[0]), look.pair.teacher
    assert not beside.training
    assert not any(parameter.requires_grad for parameter in beside.parameters())
    assert chunk.training
    optimised = sum(
        parameter.numel()
        for part in megatron_optimizers(look.run.optimizer)
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    )
    assert optimised == sum(parameter.numel() for parameter in chunk.parameters())
    saved = tensors_of(paths.iteration_dir(tmp_path / "run", 2))
    weights = [tensor for name, tensor in saved.items() if not name.startswith("optimizer.")]
    assert sum(tensor.numel() for tensor in weights) == optimised


# ------------------------------------------------------------------------------------------- saved and resumed


def interrupted(teacher, save, learn, stop):
    return run_student(
        teacher,
        learn,
        train={"train_iters": 4, "exit_interval": stop},
        model={"hidden_dropout": 0.1},
        checkpoint=CheckpointConfig(save=str(save)),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("learn", [HIDDEN, TOP], ids=["hidden", "top"])
def test_resume_is_exact(teacher, tmp_path, learn):
    whole, losses = interrupted(teacher, tmp_path / "whole", learn, None)
    _, first = interrupted(teacher, tmp_path / "halves", learn, 2)
    second, rest = interrupted(teacher, tmp_path / "halves", learn, None)
    assert first.train + rest.train == losses.train
    weights, expected = whole_weights([second]), whole_weights([whole])
    assert any("distillation" in name for name in expected) == (learn is HIDDEN)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_teacher_is_refused(teacher, tmp_path):
    interrupted(teacher, tmp_path / "run", LEARN, 2)
    other = shutil.copytree(teacher, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"distill.teacher=\S+teacher, whose weights differ.*checkpoint.save"
    ):
        interrupted(other, tmp_path / "run", LEARN, None)


def test_the_result_is_an_ordinary_model(teacher, student, tmp_path):
    """Without the maps it is exported, and it starts another run."""
    save = CheckpointConfig(save=str(tmp_path / "run"))
    look = first_step(config_from(student, teacher, HIDDEN, save, train={"train_iters": 1}))
    trained = {
        name: one.detach().clone() for name, one in unwrap(look.run.model[0]).named_parameters()
    }
    forget_model_parallel()
    AutoBridge.from_hf_pretrained(str(student)).export_ckpt(
        str(tmp_path / "run"), str(tmp_path / "hf"), show_progress=False
    )
    forget_model_parallel()
    exported = AutoBridge.from_hf_pretrained(str(tmp_path / "hf")).to_megatron_model(
        wrap_with_ddp=False
    )
    for name, one in exported[0].named_parameters():
        assert torch.equal(one, trained[name]), name
    forget_model_parallel()
    after = config_from(tmp_path / "hf", teacher, LEARN, train={"train_iters": 1})
    after.distill, after.checkpoint.pretrained_checkpoint = None, str(tmp_path / "run")
    pretrain(after, forward_step)


def test_adapters_learn_from_a_teacher(teacher, student):
    config = config_from(student, teacher, LEARN, peft=LoRA(dim=4), train={"train_iters": 3})
    losses = Losses()
    look = Look()
    distill(config, [losses, look])
    assert all(
        "adapter" in name
        for name, one in unwrap(look.run.model[0]).named_parameters()
        if one.requires_grad
    )
    assert set(losses.train[0]) == {"lm loss", "kl loss"}


# ------------------------------------------------------------------------------------------------------ cached


def cached(folder, **changes):
    return {**TOP, "cache": str(folder), **changes}


def write_cache(teacher, folder, **changes):
    precompute(student_config(teacher, cached(folder, **changes), train={"train_iters": 3}))
    forget_model_parallel()


def learn_from_cache(teacher, folder, **changes):
    return run_student(teacher, cached(folder, **changes), train={"train_iters": 3})


def test_a_cache_is_the_teacher(teacher, tmp_path):
    live, expected = run_student(teacher, TOP, train={"train_iters": 3})
    write_cache(teacher, tmp_path)
    for name in (teacher, None):
        record, found = run_student(name, cached(tmp_path), train={"train_iters": 3})
        assert found.train == [pytest.approx(step, rel=1e-6) for step in expected.train]
        assert set(found.valid[0]) == {"lm loss"}
        weights, reference_weights = whole_weights([record]), whole_weights([live])
        for key, weight in reference_weights.items():
            assert (weights[key] - weight).abs().max() < 1e-6, key


def test_a_cache_holds_what_a_growing_batch_draws(teacher, tmp_path):
    """Neither more nor less: corpora deal their documents out by the number of samples."""
    train = {"train_iters": 3, "rampup_batch_size": [4, 4, 4]}
    precompute(student_config(teacher, cached(tmp_path), train=train))
    forget_model_parallel()
    run_student(teacher, cached(tmp_path), train=train)
    assert json.loads((tmp_path / "cache.json").read_text())["samples"] == 4 + 8 + 8


def test_an_interrupted_cache_goes_on(teacher, tmp_path, monkeypatch, capsys):
    from megatron.bridge.training.distillation import cache_teacher as module

    monkeypatch.setattr(module, "MICROBATCHES_PER_ROUND", 4)
    forward, calls = module._forward, []

    def breaks(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        forward(*arguments)

    monkeypatch.setattr(module, "_forward", breaks)
    with pytest.raises(KeyboardInterrupt):
        write_cache(teacher, tmp_path)
    forget_model_parallel()
    with pytest.raises(UserError, match=r"has 8 of 24 samples: run --mode cache-teacher again"):
        learn_from_cache(teacher, tmp_path)
    write_cache(teacher, tmp_path)
    assert len(calls) == 4  # of three rounds the first is not repeated
    assert "24 of 24 samples" in capsys.readouterr().err
    learn_from_cache(teacher, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"temperature": 1.0}, r"distill.temperature was 2.0, not 1.0.*--mode cache-teacher"),
        ({"top_k": 5}, r"distill.top_k was 8, not 5"),
    ],
)
def test_a_cache_of_other_settings_is_refused(teacher, tmp_path, changes, sentence):
    write_cache(teacher, tmp_path)
    with pytest.raises(UserError, match=sentence):
        learn_from_cache(teacher, tmp_path, **changes)


def test_a_cache_of_another_teacher_is_refused(teacher, student, tmp_path):
    write_cache(teacher, tmp_path)
    with pytest.raises(
        UserError,
        match=r"the teacher was \S+teacher, whose weights differ from those of \S+student",
    ):
        learn_from_cache(student, tmp_path)


def test_a_cache_of_other_data_is_refused(teacher, tmp_path):
    write_cache(teacher, tmp_path)
    config = student_config(teacher, cached(tmp_path), train={"train_iters": 3})
    config.dataset.random_seed = 5
    with pytest.raises(
        UserError, match=r"training sample 0 differs from the one that the teacher saw"
    ):
        distill(config)


def test_a_cache_of_fewer_samples_is_refused(teacher, tmp_path):
    write_cache(teacher, tmp_path)
    with pytest.raises(UserError, match=r"has 24 samples, this run uses 32.*--mode cache-teacher"):
        run_student(teacher, cached(tmp_path), train={"train_iters": 4})


# ----------------------------------------------------------------------------------------------------- refused

WRONG = {
    "no teacher": ({"teacher": None}, {}, r"distill needs distill.teacher or distill.cache: give"),
    "nothing learnt": ({"kl_weight": 0.0}, {}, r"nothing is learned, raise one of them"),
    "negative": ({"ce_weight": -1.0}, {}, r"distill.ce_weight=-1.0: must be at least 0"),
    "cold": ({"temperature": 0.0}, {}, r"distill.temperature=0.0: must be above 0"),
    "too many": (
        {"top_k": VOCABULARY},
        {},
        r"distill.top_k=96: must lie between 1 and the vocabulary",
    ),
    "no weight": (
        {"hidden_layers": {1: 1}},
        {},
        r"distill.hidden_layers=.* needs distill.hidden_weight: set both",
    ),
    "no such layer": (
        {"hidden_weight": 1.0, "hidden_layers": {5: 1}},
        {},
        r"the student has layers 1 to 4, not 5",
    ),
    "cache of all": ({"cache": "x"}, {}, r"distill.cache=x needs distill.top_k: set"),
    "more tokens": (
        {},
        {"mtp_num_layers": 1},
        r"distill and model.mtp_num_layers=1 exclude each other: .*, unset",
    ),
    "recomputed": (
        HIDDEN,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        r"hidden states of recomputed layers have no gradient",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(teacher, name):
    learn, model, sentence = WRONG[name]
    config = student_config(
        teacher, {**LEARN, **learn} if "teacher" not in learn else LEARN, model=model
    )
    if "teacher" in learn:
        config.distill.teacher = None
    with pytest.raises(UserError, match=sentence):
        config.validate(1)


def test_hidden_states_exclude_virtual_stages_and_adapters(teacher):
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = student_config(teacher, HIDDEN, model=sizes, peft=LoRA())
    config.checkpoint.pretrained_checkpoint = "x"
    with pytest.raises(
        UserError, match=r"(?s)leave the virtual stages out.*learn from logits only"
    ):
        config.validate(2)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    other = save_teacher(tmp_path / "other", vocab_size=97)
    with pytest.raises(
        UserError, match=r"distill.teacher=\S+: its vocabulary size is 97, the student's is 96"
    ):
        distill(student_config(other))


def test_a_teacher_with_fewer_positions_is_refused(tmp_path):
    other = save_teacher(tmp_path / "other", max_position_embeddings=16)
    with pytest.raises(
        UserError, match=r"it supports 16 positions, fewer than dataset.seq_length=32"
    ):
        distill(student_config(other))


def test_a_layer_that_the_teacher_has_not_is_refused(teacher):
    learn = {**LEARN, "hidden_weight": 1.0, "hidden_layers": {1: 9}}
    with pytest.raises(
        UserError, match=r"distill.hidden_layers contains its layers \[9\]: use layers 1 to 8"
    ):
        distill(student_config(teacher, learn))


def test_a_teacher_that_does_not_fit_the_layout_is_refused(tmp_path):
    other = save_teacher(tmp_path / "other", num_hidden_layers=3, intermediate_size=98)
    sizes = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 4}
    config = student_config(other, model=sizes)
    config.model.vocab_size = VOCABULARY
    config = config.resolve(8).config
    with pytest.raises(
        UserError, match=r"does not divide model.ffn_hidden_size=98.*num_layers=3.*cache-teacher"
    ):
        teacher_provider(config, 8)


def test_heads_of_the_teacher_are_padded_for_the_layout(teacher):
    config = student_config(teacher, model={"tensor_model_parallel_size": 2})
    config = config.resolve(2).config
    assert teacher_provider(config, 2).padded_heads == (8, 4)


def save_tokenizer(directory, words):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=words[1]).save_pretrained(directory)
    return str(directory)


def test_another_tokenizer_is_refused(teacher, tmp_path):
    words = [f"w{number}" for number in range(VOCABULARY)]
    other = shutil.copytree(teacher, tmp_path / "teacher")
    save_tokenizer(other, [*words[:-2], words[-1], words[-2]])
    config = student_config(other)
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "HuggingFaceTokenizer", None
    config.tokenizer.tokenizer_model = save_tokenizer(tmp_path / "tokenizer", words)
    with pytest.raises(UserError, match=r"the ids of 2 tokens differ, for example of 'w95'"):
        distill(config)


def test_a_teacher_is_not_ignored(teacher):
    with pytest.raises(UserError, match=r"distill is set.*use `--mode distill`"):
        pretrain(student_config(teacher), forward_step)


def test_distill_needs_the_block():
    with pytest.raises(UserError, match=r"distill is not set"):
        distill(toy_config())


def test_the_block_is_written_and_read(teacher):
    config = student_config(teacher, HIDDEN)
    assert ConfigContainer.from_yaml(config.to_yaml()).distill == config.distill
    assert config.resolve().config.distill == config.distill
    assert isinstance(config.distill, DistillConfig)


def test_no_cache_is_one_sentence(teacher, tmp_path):
    with pytest.raises(
        UserError, match=re.escape(f"distill.cache={tmp_path} is not a cache of a teacher")
    ):
        learn_from_cache(teacher, tmp_path)
    assert not parallel_state.model_parallel_is_initialized()


def test_a_distillation_resolves_its_config_once(teacher, resolutions):
    run_student(teacher, train={"train_iters": 1})
    assert len(resolutions) == 1
