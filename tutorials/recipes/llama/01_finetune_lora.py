# SPDX-License-Identifier: Apache-2.0
"""Fine-tune with LoRA on conversations, and use the result with transformers.

python tutorials/recipes/llama/01_finetune_lora.py

It starts from the model of 00_quickstart_pretrain.py. Any other model works, for example the one of `make demo`:
MODEL=.cache/demo/SmolLM2-135M-Instruct python tutorials/recipes/llama/01_finetune_lora.py
"""

import os
import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.llama import llama32_1b_finetune_config
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

DATA = Path(__file__).parents[2] / "data"
OUT = Path("runs/tutorials/llama")
MODEL = os.environ.get(
    "MODEL", "runs/tutorials/llama/hf"
)  # a folder in Hugging Face format, or a hub id

config = llama32_1b_finetune_config(
    peft="lora",  # or "dora"; None trains all weights
    pretrained_checkpoint=MODEL,  # no conversion is needed
    tokenizer=MODEL,
    dataset_root=str(DATA / "chats"),  # training.jsonl and validation.jsonl
    seq_length=128,
    train_iters=120,
    global_batch_size=8,
    micro_batch_size=8,
    lr=1e-2,  # adapters start from zero and tolerate a higher rate than pretrained weights
    eval_interval=60,
    eval_iters=1,
    precision="fp32",
    dir=str(OUT / "lora"),
)
# The recipe describes Llama 3.2 1B. MODEL is smaller, so these two lines use its own config. Leave them out if
# MODEL is meta-llama/Llama-3.2-1B.
config.model = AutoBridge.from_hf_pretrained(MODEL).to_megatron_provider(load_weights=False)
config.model.seq_length = config.dataset.seq_length

config.dataset.do_test = False  # there is no test.jsonl; without this line, that is an error

# The rank of the adapters. The recipe recommends 16, on all linear layers.
config.peft.dim = 8
config.peft.alpha = 16
config.logger.log_interval = 20

# Before the first step, the run reports how many tokens are trained on and how long the samples are.
run = finetune(config, forward_step)

# There are two ways to export it: the adapter alone, a few kilobytes for the peft library ...
bridge = AutoBridge.from_hf_pretrained(MODEL)
for folder in (OUT / "adapter", OUT / "merged"):
    shutil.rmtree(folder, ignore_errors=True)  # an export never overwrites
bridge.save_hf_adapter(run.model, OUT / "adapter")
# ... or a complete model with the adapter merged into its weights.
bridge.save_hf_pretrained(run.model, OUT / "merged")

question = [{"role": "user", "content": "What colour is the light of Gull Rock?"}]
for folder in (MODEL, OUT / "merged"):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    print(
        f"{folder}: {tokenizer.decode(tokens[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)!r}"
    )
