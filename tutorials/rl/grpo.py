# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning with GRPO or PPO: a small random model learns to add digits from a reward alone.

python tutorials/rl/grpo.py                                                 # three minutes on two cores
python tutorials/rl/grpo.py --critic                                        # PPO: a second model predicts rewards
torchrun --nproc-per-node=2 tutorials/rl/grpo.py tensor_model_parallel_size=2   # the same on two processes
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.bridge.recipes.llama import llama32_1b_grpo_config
from megatron.bridge.training.config import CriticConfig
from megatron.bridge.training.grpo import grpo
from megatron.bridge.utils import distributed

OUT = Path("runs/tutorials/grpo")
LETTERS = "0123456789+="


def right_sum(completions, answer, **_):
    """1 for a completion that begins with the sum, else 0."""
    return [float(text[:1] == digit) for text, digit in zip(completions, answer, strict=True)]


def distance(completions, answer, **_):
    """The distance from the sum, from 0 to -1: it also tells wrong digits apart."""
    return [
        -abs(int(text[0]) - int(digit)) / 9 if text[:1].isdigit() else -1.0
        for text, digit in zip(completions, answer, strict=True)
    ]


def make_model(directory):
    """A small random Llama, and a tokenizer with a token for each letter."""
    vocabulary = {letter: index for index, letter in enumerate([*LETTERS, "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        directory
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        num_attention_heads=4,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        eos_token_id=len(LETTERS),
        bos_token_id=None,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def make_prompts(folder):
    """All sums of two digits that are a digit: a prompt, and the answer for the reward function."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    (folder / "training.jsonl").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", help="options of the recipe, such as parallel sizes")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--critic", action="store_true", help="train a critic, too (PPO)")
    args = parser.parse_args()
    distributed.initialize()
    if distributed.rank() == 0:
        make_model(OUT / "model")
        make_prompts(OUT / "prompts")
    distributed.barrier()

    # Any recipe of fine-tuning can be used; this one sets the learning rate and the schedule of GRPO.
    config = llama32_1b_grpo_config(
        hf_model=str(OUT / "model"),
        dataset_root=str(OUT / "prompts"),
        precision="fp32",
        seq_length=16,
        global_batch_size=256,  # completions: 32 prompts with 8 each
        micro_batch_size=64,
        train_iters=args.steps,
        lr=3e-3,
        **{name: int(size) for name, _, size in (word.partition("=") for word in args.sizes)},
    )
    config.grpo.num_generations = 8
    config.grpo.max_completion_length = 2
    config.grpo.num_iterations = 2  # train twice on each generation
    config.grpo.epsilon_high = 0.5  # unlikely right answers become likely sooner
    if args.critic:
        config.grpo.advantage_estimator = "gae"
        config.grpo.num_generations = 1
        config.grpo.num_iterations = 4
        config.grpo.critic = CriticConfig(lr=3e-3)
    config.logger.log_interval = 10
    config.logger.log_dir = str(OUT / "log")
    grpo(config, reward_funcs=[right_sum, distance])


if __name__ == "__main__":
    main()
