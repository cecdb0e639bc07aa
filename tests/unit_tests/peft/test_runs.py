# SPDX-License-Identifier: Apache-2.0
"""Adapters in runs: what is saved, from where it goes on, and the command line around it."""

import shutil

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.main import main
from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import (
    CheckpointConfig,
    DistributedDataParallelConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    TokenizerConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import DECODER, batch
from tests.toy_models import make_llama
from tests.toy_run import toy_config
from tests.workers import forget_model_parallel

STEPS, LENGTH = 4, 16


def config_of(base, save=None, peft=None, stop=None, layout=None, ddp=None, **checkpoint):
    model = AutoBridge.from_hf_pretrained(base).to_megatron_provider(load_weights=False)
    model.seq_length = LENGTH
    for name, value in (layout or {}).items():
        setattr(model, name, value)
    config = toy_config(
        train={
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "train_iters": STEPS,
            "exit_interval": stop,
        },
        dataset=MockGPTDatasetConfig(seq_length=LENGTH),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=DECODER["vocab_size"]),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(
            save=save and str(save), pretrained_checkpoint=str(base), **checkpoint
        ),
        ddp=DistributedDataParallelConfig(**(ddp or {})),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5),
        peft=peft,
    )
    config.model = model
    config.model.calculate_per_token_loss = True
    return config


def tune(*arguments, **options):
    """All parameters by name after a run."""
    run = finetune(config_of(*arguments, **options), forward_step)
    weights = {name: one.detach().clone() for name, one in run.model[0].module.named_parameters()}
    forget_model_parallel()
    return weights


def is_adapter(name):
    return ".adapter." in name


@pytest.fixture(scope="module")
def tuned(models, tmp_path_factory):
    """A finished LoRA run: its folder and its weights."""
    save = tmp_path_factory.mktemp("run") / "lora"
    return save, tune(models("llama"), save, LoRA(dim=4, dropout=0.1))


def test_only_adapters_train_and_are_saved(models, tuned):
    save, weights = tuned
    start = AutoBridge.from_hf_pretrained(models("llama")).to_megatron_model(wrap_with_ddp=False)
    base = dict(start[0].named_parameters())
    assert {name for name in weights if not is_adapter(name)} == set(base)
    assert all(torch.equal(weights[name], base[name]) for name in base)
    assert all(weight.abs().sum() > 0 for weight in weights.values())
    from tests.functional_tests.checkpoint.runs import tensors_of

    stored = tensors_of(paths.iteration_dir(save, STEPS))
    assert stored
    assert all(is_adapter(name) for name in stored)
    assert sum(
        one.numel() for name, one in stored.items() if not name.startswith("optimizer")
    ) == sum(one.numel() for name, one in weights.items() if is_adapter(name))


def test_resume_is_bitwise(models, tuned, tmp_path):
    _, weights = tuned
    tune(models("llama"), tmp_path / "run", LoRA(dim=4, dropout=0.1), stop=2)
    again = tune(models("llama"), tmp_path / "run", LoRA(dim=4, dropout=0.1))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def other_base(tmp_path):
    make_llama(tmp_path, seed=1, **DECODER)
    (tmp_path / "tokenizer.json").unlink()  # it has no tokens
    return tmp_path


def test_another_base_is_refused(tuned, tmp_path):
    save, _ = tuned
    with pytest.raises(
        UserError, match=r"whose weights differ from those of checkpoint\.pretrained_checkpoint"
    ):
        tune(other_base(tmp_path), save, LoRA(dim=4, dropout=0.1))


def test_the_base_may_move_and_change_its_format(models, tuned, tmp_path):
    save, weights = tuned
    bridge = AutoBridge.from_hf_pretrained(models("llama"))
    bridge.save_megatron_model(bridge.to_megatron_model(wrap_with_ddp=False), tmp_path / "megatron")
    forget_model_parallel()
    shutil.copytree(models("llama"), tmp_path / "hf")
    config = config_of(tmp_path / "hf", save, LoRA(dim=4, dropout=0.1))
    config.checkpoint.pretrained_checkpoint = str(tmp_path / "megatron")
    run = finetune(config, forward_step)
    for name, weight in run.model[0].module.named_parameters():
        assert torch.equal(weight, weights[name])


def test_a_run_without_peft_does_not_take_adapters_for_weights(models, tuned):
    save, _ = tuned
    with pytest.raises(UserError, match=r"holds adapters of .*, but peft is not set"):
        tune(models("llama"), save)


def test_adapters_do_not_go_on_from_all_weights(models, tmp_path):
    tune(models("llama"), tmp_path / "run", stop=1)
    with pytest.raises(UserError, match="holds all weights, not adapters"):
        tune(models("llama"), tmp_path / "run", LoRA(dim=4))


def test_adapters_of_another_run_are_a_start(models, tuned):
    save, weights = tuned
    config = config_of(models("llama"), None, LoRA(dim=4), load=str(save), finetune=True)
    config.train.train_iters = STEPS
    config.optimizer.lr = 1e-30
    run = finetune(config, forward_step)
    for name, weight in run.model[0].module.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-8)


def test_a_base_is_needed(models):
    config = config_of(models("llama"), None, LoRA(dim=4))
    config.checkpoint.pretrained_checkpoint = None
    with pytest.raises(UserError, match=r"peft needs checkpoint\.pretrained_checkpoint: give"):
        pretrain(config, forward_step)


def logits_of(directory):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory).eval()(batch()[0]).logits


def test_merge_export_and_unmerge(models, tuned, tmp_path, capsys):
    save, _ = tuned

    def adapter(action, **options):
        arguments = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        assert main(["adapter", action, *arguments]) == 0, capsys.readouterr().err
        forget_model_parallel()

    adapter("merge", adapter=save, hf_path=tmp_path / "merged")
    adapter("export", adapter=save, hf_path=tmp_path / "adapter")
    adapter("merge", adapter=tmp_path / "adapter", hf_path=tmp_path / "again")
    adapter(
        "unmerge",
        adapter=tmp_path / "adapter",
        hf_model=tmp_path / "merged",
        hf_path=tmp_path / "base",
    )
    base, merged = logits_of(models("llama")), logits_of(tmp_path / "merged")
    assert (merged - base).abs().max() > 1e-3
    assert torch.equal(merged, logits_of(tmp_path / "again"))
    torch.testing.assert_close(logits_of(tmp_path / "base"), base, rtol=1e-5, atol=1e-5)
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(make_llama(**DECODER), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(batch()[0]).logits, merged, rtol=1e-5, atol=1e-5)


def test_a_run_generates_like_its_merged_model(models, tuned, tmp_path):
    save, _ = tuned
    assert (
        main(["adapter", "merge", "--adapter", str(save), "--hf-path", str(tmp_path / "merged")])
        == 0
    )
    assert (
        main(["adapter", "export", "--adapter", str(save), "--hf-path", str(tmp_path / "adapter")])
        == 0
    )
    forget_model_parallel()
    ids = batch()[0]
    expected = (
        logits_of(tmp_path / "merged")[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    )
    for path, adapter in (
        (save, None),
        (models("llama"), save),
        (models("llama"), tmp_path / "adapter"),
    ):
        with LLM(str(path), adapter=adapter and str(adapter), kv_memory=1 << 22) as llm:
            found = llm.logprobs(ids.tolist())
        forget_model_parallel()
        scores = torch.tensor([[one.logprob for one in row] for row in found])
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="whose weights differ from those of"):
        LLM(str(other_base(tmp_path / "other")), adapter=str(save), kv_memory=1 << 22)
    with pytest.raises(UserError, match="remove --adapter"):
        LLM(str(save), adapter=str(save), kv_memory=1 << 22)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "nemotron_h"])
@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_adapters_of_every_kind_generate(models, kind, method):
    """With adapters that are not zero, cached log-probabilities equal those of one full pass."""
    bridge = AutoBridge.from_hf_pretrained(models(kind))
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    method(dim=4)(model, training=False)
    torch.manual_seed(3)
    for name, weight in model[0].named_parameters():
        if ".adapter." in name and weight.dim() > 1:
            weight.data.normal_(0, 0.1)
    ids, positions = batch()[0], batch()[2]
    model[0].eval()
    with torch.no_grad():
        logits = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
    expected = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    config = EngineConfig(64, DECODER["vocab_size"], chunk=4, rows=16, kv_memory=1 << 22, pack=True)
    with Engine(model, config) as engine:
        sampling = Sampling(max_new_tokens=0, prompt_logprobs=0)
        jobs = [engine.submit(row, sampling)[0] for row in ids.tolist()]
        list(engine.run())
    scores = torch.tensor([[one.logprob for one in job.completion.prompt_logprobs] for job in jobs])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    forget_model_parallel()


def test_command_line_refuses_another_base(tuned, tmp_path, capsys):
    save, _ = tuned
    other = other_base(tmp_path)
    capsys.readouterr()  # what transformers shows while it writes
    code = main(
        [
            "adapter",
            "merge",
            "--adapter",
            str(save),
            "--hf-model",
            str(other),
            "--hf-path",
            str(tmp_path / "m"),
        ]
    )
    error = capsys.readouterr().err
    assert code == 1
    assert "whose weights differ from those of" in error
    assert len(error.splitlines()) == 1


def test_dora_cannot_be_unmerged(models, tmp_path, capsys):
    tune(models("llama"), tmp_path / "run", DoRA(dim=2), stop=1)
    arguments = [
        "--adapter",
        str(tmp_path / "run"),
        "--hf-model",
        str(models("llama")),
        "--hf-path",
        str(tmp_path / "m"),
    ]
    assert main(["adapter", "unmerge", *arguments]) == 1
    assert "DoRA cannot be taken out of a merged model" in capsys.readouterr().err
