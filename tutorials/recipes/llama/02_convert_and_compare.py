# SPDX-License-Identifier: Apache-2.0
"""Convert a model from Hugging Face to Megatron and back: the logits and the files stay the same.

python tutorials/recipes/llama/02_convert_and_compare.py
torchrun --nproc-per-node=2 tutorials/recipes/llama/02_convert_and_compare.py

Under torchrun the model is split over the processes (tensor parallelism), and all results are the same.
"""

import filecmp
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.check.compare_logits import run_megatron

OUT = Path("runs/tutorials/llama/convert")
MODEL = os.environ.get(
    "MODEL", "runs/tutorials/llama/hf"
)  # a folder in Hugging Face format, or a hub id
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

if RANK == 0:
    shutil.rmtree(OUT, ignore_errors=True)

# The bridge reads config.json and the headers of the weight files, but no weights yet. An unknown key of the
# config is an error.
bridge = AutoBridge.from_hf_pretrained(MODEL, dtype=torch.float32)

# The provider is Megatron-Core's TransformerConfig and can build the model. Set the parallel sizes before it does.
provider = bridge.to_megatron_provider()
provider.tensor_model_parallel_size = PROCESSES
provider.make_query_groups_divisible_by = PROCESSES  # pads the 9 heads of SmolLM2 with zeros
model = provider.provide_distributed_model(wrap_with_ddp=False)

# The plan lists which tensors become which parameter. Every tensor and every parameter occurs in it exactly once.
if RANK == 0:
    print(*str(bridge.plan(model)).splitlines()[:8], "...", sep="\n")

# Compare the logits.
tokenizer = AutoTokenizer.from_pretrained(MODEL)
ids = tokenizer(
    "The light of Gull Rock is white and shows two flashes.", return_tensors="pt"
).input_ids
ours = run_megatron(model, ids).logits  # gathered from all processes
if RANK == 0:
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(ids).logits
    difference = (ours - theirs).abs().max() / theirs.std()
    print(f"largest difference of two logits: {difference:.1e} of their standard deviation")
    assert difference < 1e-4, "float32 sums in a different order differ by less than this"

# A Megatron checkpoint loads under any other layout, and can be exported to Hugging Face format.
bridge.save_megatron_model(model, OUT / "megatron")
bridge.save_hf_pretrained(model, OUT / "hf")
if RANK == 0:
    folder = Path(bridge.hf_pretrained.directory)
    names = sorted(
        path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )
    same, different, missing = filecmp.cmpfiles(folder, OUT / "hf", names, shallow=False)
    print(f"{len(same)} files are byte for byte the same: {', '.join(same)}")
    assert not different, different
    assert not missing, missing
