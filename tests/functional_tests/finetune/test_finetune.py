# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on conversations from start to end: checks, frozen parts, answers on the way, and the report."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.observe.sample_generation import generate
from megatron.bridge.training.config import (
    CheckpointConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.toy_run import initialize_by_name, local_shards, save_llama, toy_config
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.data.records.chat_forms import CONTROL_TOKENS, FORMS

LENGTH = 64
CHATML = next(form for form in FORMS if form.name == "chatml")
TURNS = [("hi", "Peace!"), ("who?", "The gentle rain."), ("more", "Once more.")]


def write_tokenizer(source, directory, swapped=False):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(source)
    hf.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS})
    hf.chat_template = CHATML.template
    hf.save_pretrained(directory)
    if swapped:
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        path.write_text(json.dumps(content))
    return len(hf)


@pytest.fixture
def model_dir(tmp_path, tokenizer_dir, run_in_process):  # noqa: F811
    """A tiny Hugging Face model with a tokenizer that has a chat template."""
    size = write_tokenizer(tokenizer_dir, tmp_path / "hf")
    return save_llama(tmp_path / "hf", vocab_size=size, max_position_embeddings=LENGTH)


@pytest.fixture
def chats(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    for stem in ("training", "validation"):
        lines = []
        for question, answer in TURNS:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            lines.append(json.dumps({"messages": messages}) + "\n")
        (folder / f"{stem}.jsonl").write_text("".join(lines))
    return folder


def make_config(model_dir, chats, run_dir, steps=60):
    provider = AutoBridge.from_hf_pretrained(str(model_dir)).to_megatron_provider(
        load_weights=False
    )
    config = toy_config(
        train={"train_iters": steps, "micro_batch_size": 1, "global_batch_size": 2},
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(model_dir), save=str(run_dir)),
        logger=LoggerConfig(log_interval=10, log_dir=str(run_dir)),
        tokenizer=TokenizerConfig(tokenizer_model=str(model_dir)),
        dataset=FinetuningDatasetConfig(
            seq_length=LENGTH,
            dataset_root=str(chats),
            do_test=False,
            packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=LENGTH),
        ),
        validation=ValidationConfig(eval_interval=20, eval_iters=1),
    )
    provider.seq_length = LENGTH
    config.model = provider
    return config


def greedy(model_dir, question, count):
    """transformers' own continuation by the untrained model."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(model_dir)
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    ids = hf.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=count, do_sample=False, eos_token_id=hf.eos_token_id)
    return hf.decode(out[0, ids["input_ids"].size(1) :])


def test_a_model_learns_its_answers_and_the_run_tells(model_dir, chats, tmp_path):
    torch.set_num_threads(1)
    run_dir = tmp_path / "run"
    config = make_config(model_dir, chats, run_dir)
    config.logger.sample_prompts = [[{"role": "user", "content": "who?"}]]
    config.logger.sample_interval, config.logger.sample_max_new_tokens = 30, 24
    run = finetune(config, forward_step)
    assert run.config.model.calculate_per_token_loss

    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 30, 60]
    assert lines[0]["answer"] == greedy(model_dir, "who?", 24)
    assert lines[-1]["answer"] == "The gentle rain.<|im_end|>"

    summary = json.loads((run_dir / "data_preview.json").read_text())
    train = summary["splits"][0]
    assert (train["name"], train["report"]["samples"], train["report"]["dropped"]) == (
        "train",
        3,
        {},
    )
    assert summary["first_batches"][0]["trained"] > 0
    page = (run_dir / "data_preview.html").read_text()
    assert "\u27e6Peace!&lt;|im_end|&gt;" in page

    report = (run_dir / "report.md").read_text()
    for text in (
        "60 of 60 steps",
        "| train |",
        "| validation |",
        "who?",
        "After step 0",
        "gentle rain",
        "train.train_iters=120 scheduler.lr_decay_iters=null scheduler.override_opt_param_scheduler=true\n",
        f"## To export\n\n```bash\nmegatron-bridge export --hf-model {model_dir} --megatron-path ",
    ):
        assert text in report
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_frozen_parts_stay_and_the_rest_moves(model_dir, chats, tmp_path):
    torch.set_num_threads(1)
    seen = {}

    class Watch(Callback):
        def on_train_start(self, context):
            seen.update(
                {name: p.detach().clone() for name, p in context.model[0].named_parameters()}
            )

    config = make_config(model_dir, chats, tmp_path / "run", steps=2)
    config.train.frozen = ["*embedding*", "*layers.0.self_attention*"]
    run = finetune(config, forward_step, [Watch()])
    moved = {name for name, p in run.model[0].named_parameters() if not torch.equal(p, seen[name])}
    stayed = {name for name in seen if "embedding" in name or "layers.0.self_attention" in name}
    assert stayed
    assert moved == set(seen) - stayed


def test_a_pattern_that_names_nothing_is_refused(model_dir, chats, tmp_path):
    config = make_config(model_dir, chats, tmp_path / "run", steps=1)
    config.train.frozen = ["embedding.word_embedings.weight"]
    with pytest.raises(
        UserError, match=r"word_embedings.weight matches no trained parameter; did you mean"
    ):
        finetune(config, forward_step)


def moved(frozen, layout):
    """Which weights of a tied model two steps change, by name and layer in the whole model."""
    start, found = {}, {}

    class Watch(Callback):
        def on_train_start(self, context):
            start.update({place: weight.clone() for place, weight in weights(context)})

        def on_train_end(self, context):
            found.update(
                {place: not torch.equal(weight, start[place]) for place, weight in weights(context)}
            )

    def weights(run):
        for shard in local_shards(run.model):
            yield (shard.key, *shard.global_offset[: shard.prepend_axis_num]), shard.data

    config = toy_config(
        model={"share_embeddings_and_output_weights": True, **layout},
        train={"train_iters": 2, "micro_batch_size": 1, "frozen": frozen},
        validation=ValidationConfig(),
    )
    config.model.register_pre_wrap_hook(initialize_by_name)
    pretrain(config, forward_step, [Watch()])
    return found


def test_layers_are_counted_through_stages_and_a_tied_output_layer_goes_with_its_embedding(
    two_workers,
):
    stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    parts = two_workers.run(moved, ["embedding.*", "decoder.layers.3.*"], stages)
    found = parts[0] | parts[1]
    still = {place for place, changed in found.items() if not changed}
    layers = {place[1] for place in found if len(place) > 1}
    assert layers == {0, 1, 2, 3}
    assert {place[1:] for place in still} == {(), (3,)}
    assert {place[0] for place in still if len(place) == 1} == {"embedding.word_embeddings.weight"}
    assert not [place for place, changed in found.items() if changed and place[1:] == (3,)]


def test_another_tokenizer_is_refused_before_anything_is_built(
    model_dir,
    chats,
    tmp_path,
    tokenizer_dir,  # noqa: F811 - the fixture
):
    write_tokenizer(tokenizer_dir, tmp_path / "other", swapped=True)
    config = make_config(model_dir, chats, tmp_path / "run")
    config.tokenizer.tokenizer_model = str(tmp_path / "other")
    with pytest.raises(
        UserError,
        match=r"is not the tokenizer of .*: the ids of 2 tokens differ, for example of 'a'",
    ):
        finetune(config, forward_step)


def generated(layout):
    """Continuations by the toy model in a layout; its weights depend on names only."""
    from megatron.bridge.training.setup import setup

    config = toy_config(model=layout, train={"train_iters": 1})
    config.model.register_pre_wrap_hook(initialize_by_name)
    run = setup(config, forward_step)
    return generate(run, [[1, 2, 3], [7], [20, 21, 22, 23, 24]], 4)


def test_answers_are_those_of_full_recomputation_under_any_layout(two_workers, four_workers):
    alone = two_workers.run(generated, {})
    layouts = [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_dtype": torch.float32,
        },
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    ]
    for layout in layouts:
        assert two_workers.run(generated, layout) == alone
    for more in (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
    ):
        assert four_workers.run(generated, {"context_parallel_size": 2, **more}) == alone * 2


def test_pretraining_looks_at_its_data_first(tmp_path, run_in_process):
    config = toy_config(train={"train_iters": 1}, logger=LoggerConfig(log_dir=str(tmp_path)))
    pretrain(config, forward_step)
    summary = json.loads((tmp_path / "data_preview.json").read_text())
    assert [(part["name"], part["samples"]) for part in summary["corpora"]] == [
        ("train", 8),
        ("valid", 8),
        ("test", 8),
    ]
    assert summary["first_batches"] == [
        {"rank": 0, "samples": [0, 1], "tokens": 64, "trained": 64, "sequences": 2, "images": None}
    ]
    assert "8 samples x 32 = 256 tokens" in (tmp_path / "data_preview.html").read_text()
