# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning in one file: rollouts on two processes, training here, a refit after each step.

python tutorials/rl/policy_gradient.py                                        # a toy model, no network, a minute
python tutorials/rl/policy_gradient.py HuggingFaceTB/SmolLM2-135M --steps 25  # a real one, downloaded; 5 minutes
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.refit.canary import Canary
from megatron.bridge.inference.refit.sender import Refit
from megatron.bridge.inference.refit.stream import WeightStream
from megatron.bridge.inference.requests import Sampling

OUT = Path("runs/tutorials/rl")
TOKENIZER = Path(__file__).parents[1] / "data/tokenizer"
ROLLOUTS, LENGTH = 32, 24
PROMPT = "The lighthouse"


def make_toy(directory):
    """A small Llama that knows nothing, with the tokenizer of the data tutorials."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def reward(text):
    """A rule on the text: the share of the letter e."""
    return text.count("e") / max(len(text), 1)


def logprobs_of(model, prompt, completions):
    """Log-probabilities [rollouts, tokens] of the generated tokens, with gradients."""
    ids = torch.tensor([prompt + completion for completion in completions])
    positions = torch.arange(ids.size(1)).expand_as(ids)
    logits = model(input_ids=ids[:, :-1], position_ids=positions[:, :-1], attention_mask=None)
    chosen = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return chosen[:, len(prompt) - 1 :]


def main():
    parser = argparse.ArgumentParser(description="Reinforcement learning with a rule on the text.")
    parser.add_argument("model", nargs="?", help="directory or hub id of a model (default: a toy)")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    path, rate = args.model or str(OUT / "toy"), 5e-5 if args.model else 2e-3
    if args.model is None:
        make_toy(path)

    # The trainer: a Megatron model with the weights of the Hugging Face model, as any run builds it.
    bridge = AutoBridge.from_hf_pretrained(path)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False, bf16=False)
    optimizer = torch.optim.Adam(chunks[0].parameters(), lr=rate)

    # The engine: two processes that share out each matrix. Its layout need not be the trainer's.
    with LLM(path, tp=2, dtype="float32", max_context=64, kv_memory=1 << 28) as llm:
        prompt = llm.hf.encode(PROMPT)
        refit = Refit(llm, WeightStream(bridge, chunks), chunks, Canary([prompt]))
        curve = []
        for step in range(args.steps):
            # ignore_eos makes all rollouts equally long, so that they are one batch without padding.
            sampling = Sampling(
                LENGTH, temperature=1.0, seed=step, n=ROLLOUTS, ignore_eos=True, logprobs=0
            )
            (rollouts,) = llm.generate([prompt], sampling)
            rewards = torch.tensor([reward(rollout.text) for rollout in rollouts])
            curve.append(float(rewards.mean()))

            # REINFORCE: raise the log-probability of what was better than the average of the group.
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            logprobs = logprobs_of(chunks[0], prompt, [rollout.tokens for rollout in rollouts])
            generated = torch.tensor(
                [[one.logprob for one in rollout.logprobs] for rollout in rollouts]
            )
            mismatch = float((logprobs.detach() - generated).abs().max())
            optimizer.zero_grad()
            (-(advantages[:, None] * logprobs).mean()).backward()
            optimizer.step()

            # The engine gets the new weights, and proves with the canary that it has them.
            report = refit()
            if step % 10 == 0 or step == args.steps - 1:
                print(
                    f"step {step}: reward {curve[-1]:.3f}, log-probabilities of rollout and training differ by "
                    f"{mismatch:.0e}, refit {report.bytes / 1e6:.1f} MB in {report.seconds * 1e3:.0f} ms"
                )
        print(
            f"at the end: {llm.generate([prompt], Sampling(LENGTH, temperature=1.0, seed=0))[0][0].text!r}"
        )
    draw(curve)


def draw(curve):
    """The curve of the reward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3))
    axes.plot(curve)
    axes.set(xlabel="step", ylabel="reward (share of the letter e)")
    figure.tight_layout()
    figure.savefig(OUT / "reward.png", dpi=120)
    print(f"the curve of the reward: {OUT / 'reward.png'}")


if __name__ == "__main__":
    main()
