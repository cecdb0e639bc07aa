# SPDX-License-Identifier: Apache-2.0
"""Hugging Face to Megatron and back: the same logits, and the same bytes.

python tutorials/recipes/llama/02_convert_and_compare.py
torchrun --nproc-per-node=2 tutorials/recipes/llama/02_convert_and_compare.py

Under torchrun the model is cut over the processes (tensor parallelism), and everything below still holds.
"""

import filecmp
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.verify import run_megatron

OUT = Path("runs/tutorials/llama/convert")
MODEL = os.environ.get("MODEL", "runs/tutorials/llama/hf")  # a folder in Hugging Face format, or a hub id
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

if RANK == 0:
    shutil.rmtree(OUT, ignore_errors=True)

# A bridge has read config.json and the headers of the weight files, no weights. Every key of the config must be
# one that it understands: a key that would be dropped in silence is an error instead.
bridge = AutoBridge.from_hf_pretrained(MODEL, dtype=torch.float32)

# The provider is Megatron-Core's TransformerConfig, and can build the model. Parallel sizes are set in between;
# that is all there is to tensor parallelism.
provider = bridge.to_megatron_provider()
provider.tensor_model_parallel_size = PROCESSES
provider.make_query_groups_divisible_by = PROCESSES  # SmolLM2 has 9 heads in 3 groups: padded with heads of zeros
model = provider.provide_distributed_model(wrap_with_ddp=False)

# The plan says which tensors become which parameter. It must use every tensor and fill every parameter, exactly
# once.
if RANK == 0:
    print(*str(bridge.plan(model)).splitlines()[:8], "...", sep="\n")

# Does it compute the same?
tokenizer = AutoTokenizer.from_pretrained(MODEL)
ids = tokenizer("The light of Gull Rock is white and shows two flashes.", return_tensors="pt").input_ids
ours = run_megatron(model, ids).logits  # on all processes, put together
if RANK == 0:
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(ids).logits
    difference = (ours - theirs).abs().max() / theirs.std()
    print(f"largest difference of two logits: {difference:.1e} of their standard deviation")
    assert difference < 1e-4, "float32 sums in another order: no more than this"

# A Megatron checkpoint can be loaded under any other layout, and goes back to Hugging Face format.
bridge.save_megatron_model(model, OUT / "megatron")
bridge.save_hf_pretrained(model, OUT / "hf")
if RANK == 0:
    folder = Path(bridge.hf_pretrained.directory)
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    same, different, missing = filecmp.cmpfiles(folder, OUT / "hf", names, shallow=False)
    print(f"{len(same)} files came back byte for byte: {', '.join(same)}")
    assert not different, different
    assert not missing, missing
