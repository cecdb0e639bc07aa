# SPDX-License-Identifier: Apache-2.0
"""Training on completions that call tools, by a model that writes calls because its weights say so."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from megatron.bridge.data.config import PromptDatasetConfig
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.training.config import (
    CheckpointConfig,
    GRPOConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from megatron.bridge.training.grpo import grpo
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.training.test_grpo import Watch, log_probs
from tests.toy_run import toy_config
from tests.workers import forget_model_parallel, leave

SIZE = 64  # of the vocabulary and of the hidden state
LENGTH = 128
CALL = '{"name":"add","arguments":{"a":2,"b":3}}'
WRONG_CALL = '{"name":"subtract","arguments":{}}'
MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", CALL, WRONG_CALL]
WORDS = ["[UNK]", "system", "user", "assistant", "tool", "add", "5", "sum", "?"]
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system ' }}{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + ' ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name":"' + call.function.name + '","arguments":' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"""
NEXT = {  # what follows a token, with its logits
    "assistant": {"<tool_call>": 12.0, "5": 12.0},
    "<tool_call>": {CALL: 12.0, WRONG_CALL: 11.0},
    CALL: {"</tool_call>": 12.0},
    WRONG_CALL: {"</tool_call>": 12.0},
    "</tool_call>": {"<|im_end|>": 12.0},
    "5": {"<|im_end|>": 12.0},
}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def number_of_results(completions, **_):
    """Rewards results that are no errors, which only tools give, and final answers."""
    return [sum(message.get("content") == "5" for message in messages) for messages in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose next token depends on the last one alone, and prompts."""
    root = tmp_path_factory.mktemp("tools")
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[:2]])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS[2:]])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    hf.chat_template = TEMPLATE
    hf.save_pretrained(root / "model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE,
            hidden_size=SIZE,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        scale = SIZE**0.5  # of the last norm
        for word, following in NEXT.items():
            for follower, logit in following.items():
                ids = hf.convert_tokens_to_ids([follower, word])
                model.lm_head.weight[ids[0], ids[1]] = logit / scale
    model.save_pretrained(root / "model")
    lines = [{"prompt": [{"role": "user", "content": "sum ?"}]} for _ in range(4)]
    (root / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def config_of(root, layout=None, **settings):
    config = toy_config(
        model={
            "hidden_size": SIZE,
            "num_layers": 2,
            "vocab_size": SIZE,
            "seq_length": LENGTH,
            "layernorm_epsilon": 1e-6,
            "make_vocab_size_divisible_by": 1,
            **(layout or {}),
        },
        train={"train_iters": 2, "global_batch_size": 8, "micro_batch_size": 2},
        dataset=PromptDatasetConfig(dataset_root=str(root), seq_length=LENGTH),
        tokenizer=TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(root / "model")
        ),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=0.0),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        validation=ValidationConfig(eval_iters=0),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(root / "model")),
        grpo=GRPOConfig(
            **{
                "num_generations": 4,
                "max_completion_length": 48,
                "max_tool_calling_iterations": 3,
                "reward_funcs": [f"{__name__}:number_of_results"],
                "scale_rewards": "none",
                **settings,
            }
        ),
    )
    config.mixed_precision = "fp32"
    return config


def run(root, functions=(add,), layout=None, **settings):
    watch = Watch()
    try:
        grpo(config_of(root, layout, **settings), [watch], tools=functions)
    finally:
        forget_model_parallel()
    return watch


def alone(*arguments, **options):
    torch.set_num_threads(1)
    watch = run(*arguments, **options)
    leave()
    return watch


def naive_step(root, rollouts):
    """The loss and the norm of its gradient, over the tokens that the model wrote."""
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    total, count = 0.0, 0
    for rollout in rollouts:
        chosen = log_probs(model, rollout, 1.0)
        if rollout.is_written is not None:
            chosen = chosen[rollout.is_written]
        ratio = (chosen - chosen.detach()).exp()
        total = total - (ratio * rollout.advantage).sum()
        count += len(chosen)
    loss = total / count
    loss.backward()
    norm = torch.cat([part.grad.flatten() for part in model.parameters()]).norm()
    return loss.item(), norm.item()


def test_results_are_context_and_not_in_the_loss(folder):
    watch = alone(folder)
    step, rollouts = watch.steps[0], watch.rollouts[0]
    hf = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    texts = [hf.decode(rollout.tokens) for rollout in rollouts]
    answers = []
    called = [text for text in texts if "<tool_call>" in text]
    assert called
    assert len(called) < len(texts)
    for rollout, text in zip(rollouts, texts, strict=True):
        if "<tool_call>" not in text:
            assert rollout.is_written is None
            continue
        tokens = torch.tensor(rollout.tokens)
        written = hf.decode(tokens[rollout.is_written])
        results = hf.decode(tokens[~rollout.is_written])
        # exactly what the template writes, and nothing of it in the answers
        assert "<|im_start|>" not in written
        assert results.count("<|im_start|> tool") == min(written.count("<tool_call>"), 3)
        answers += results.split("<|im_start|> tool ")[1:]
        assert not rollout.sampler_log_probs[~rollout.is_written].any()
        whole = hf.decode([*rollout.prompt_tokens, *rollout.tokens])
        assert whole.count("<|im_start|> assistant") == 1 + text.count("<|im_start|> tool")
    loss, norm = naive_step(folder, rollouts)
    assert step["grpo loss"] == pytest.approx(loss, abs=1e-6)
    assert step["grad norm"] == pytest.approx(norm, rel=1e-4)
    assert step["sampler mismatch max"] < 1e-4
    assert step["tool calls"] == len(answers) / 8
    failed = sum(not answer.startswith("5 ") for answer in answers)
    assert 0 < failed < len(answers)
    assert step["failed tool calls"] == pytest.approx(failed / len(answers))


def test_calls_have_a_limit(folder):
    watch = alone(folder, max_tool_calling_iterations=1)
    hf = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    for rollout in watch.rollouts[0]:
        assert hf.decode(rollout.tokens).count("<|im_start|> tool") <= 1
    # a result needs about eight tokens, so that a completion has room for one or none
    short = alone(folder, max_completion_length=14)
    for rollout in short.rollouts[0]:
        assert len(rollout.tokens) <= 14
        assert rollout.is_written is None or rollout.is_written[-1]


def test_log_probs_before_a_step_are_those_of_answers(folder):
    watch = alone(folder, (), num_iterations=2, tools=[f"{__name__}:add"])
    rollout = next(part for part in watch.rollouts[0] if part.is_written is not None)
    assert not rollout.old_log_probs[~rollout.is_written].any()
    torch.testing.assert_close(rollout.old_log_probs, rollout.sampler_log_probs, rtol=0, atol=1e-4)


def steps_of(root, layout):
    return run(root, layout=layout).steps


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
        {"context_parallel_size": 2},
    ],
    ids=["dp2", "tp2", "pp2", "cp2"],
)
def test_two_processes(folder, two_workers, layout):
    expected = alone(folder).steps
    for steps in two_workers.run(steps_of, folder, layout):
        for found, wanted in zip(steps, expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-5, abs=4e-6)


def untyped(a):
    return a


@pytest.mark.parametrize(
    ("functions", "settings", "words"),
    [
        ((untyped,), {}, ("grpo.tools", "untyped", "type hint")),
        ((add,), {"exact_rollout": True}, ("grpo.tools", "exact_rollout=False")),
        ((), {"tools": ["nowhere.py:add"]}, ("grpo.tools", "nowhere.py")),
    ],
)
def test_refused(folder, functions, settings, words):
    with pytest.raises(UserError) as refusal:
        run(folder, functions, **settings)
    for word in words:
        assert word in str(refusal.value)


def test_texts_and_templates_without_tools_are_refused(folder, tmp_path):
    (tmp_path / "training.jsonl").write_text('{"prompt": "sum ?"}\n')
    config = config_of(folder)
    config.dataset.dataset_root = str(tmp_path)
    with pytest.raises(UserError, match=r"training\.jsonl.*list of messages"):
        grpo(config, tools=[add])
    leave()
    config = config_of(folder)
    config.dataset.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(UserError, match=r"grpo\.tools.*dataset\.chat_template"):
        grpo(config, tools=[add])
    leave()
