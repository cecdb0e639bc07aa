# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small Llama from random weights on a few texts, and export it to Hugging Face format.

python tutorials/recipes/llama/00_quickstart_pretrain.py
"""

import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from megatron.bridge import AutoBridge
from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

DATA = Path(__file__).parents[2] / "data"
OUT = Path("runs/tutorials/llama")
TOKENIZER = str(DATA / "tokenizer")

# Megatron reads token ids from an indexed file, not text. The file is written once; a second run of this script
# finds it. tutorials/data/README.md shows the command for large corpora.
corpus = OUT / "corpus"
corpus.parent.mkdir(parents=True, exist_ok=True)
text = PreprocessConfig(
    inputs=[DATA / "lighthouses.jsonl"],
    output_prefix=corpus,
    tokenizer_model=TOKENIZER,
    append_eod=True,
    workers=1,
)
preprocess(text)

# A recipe is a function that returns the complete config of a run: model, parallel layout, optimizer, data and
# checkpoints. Your arguments override its recommendations. Here they make the run and its samples shorter.
config = llama32_1b_pretrain_config(
    data_paths=[str(corpus)],
    split="80,10,10",  # shares of the documents for training, validation and test
    tokenizer=TOKENIZER,
    seq_length=128,
    train_iters=150,
    global_batch_size=8,
    micro_batch_size=8,  # samples per forward pass; 8 of 8 means no gradient accumulation
    lr=5e-3,  # small models tolerate high learning rates
    min_lr=5e-4,
    eval_interval=50,
    eval_iters=1,
    precision="fp32",  # few laptops compute in bf16
    save_interval=50,
    dir=str(OUT / "pretrain"),
)

# The config consists of plain dataclasses: set any other field directly. These lines shrink the model from 1.2
# billion to 0.8 million parameters. Leave them out to train the model that the recipe names.
config.model.num_layers = 4
config.model.hidden_size = 128
config.model.ffn_hidden_size = 384
config.model.num_attention_heads = 4
config.model.num_query_groups = 2
config.model.kv_channels = 32
config.model.vocab_size = 512
config.logger.log_interval = 25

# Start the script again after a kill, and the run resumes from its newest checkpoint. A finished run does nothing.
run = pretrain(config, forward_step)

# The Megatron checkpoint is in runs/tutorials/llama/pretrain. Other programs read Hugging Face format. No
# published model has this size, so the config and the tokenizer are made here. For a published size,
# `megatron-bridge export --hf-model meta-llama/Llama-3.2-1B ...` does all of this.
tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
own_tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
hf_config = LlamaConfig(**AutoBridge.hf_config_of(run.config.model) | own_tokens)
model_folder = OUT / "hf"
shutil.rmtree(model_folder, ignore_errors=True)  # an export never overwrites
AutoBridge.from_hf_config(hf_config).save_hf_pretrained(run.model, model_folder)
tokenizer.save_pretrained(model_folder)

# The result is an ordinary Hugging Face model.
model = AutoModelForCausalLM.from_pretrained(model_folder)
prompt = tokenizer("The light of Gull Rock is", return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=30, do_sample=False)
print(f"{model_folder}: {model.num_parameters():,} parameters")
print(tokenizer.decode(answer[0]))
