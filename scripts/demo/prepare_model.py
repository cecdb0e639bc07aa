# SPDX-License-Identifier: Apache-2.0
"""Turn the demo's GGUF file into an ordinary Hugging Face model directory.

The GGUF file holds 4-bit weights (Q4_1). They are dequantised and stored in bf16, so the directory has the
shape and the files of the published SmolLM2-135M-Instruct, but its weights carry the 4-bit rounding.

usage: prepare_model.py FILE.gguf OUTPUT_DIR
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from megatron.bridge.utils.atomic import published_directory


def load_dequantised(gguf: Path) -> LlamaForCausalLM:
    """The model of ``gguf`` with plain bf16 weights.

    A model that was loaded from GGUF refuses to be saved, so its weights move into a fresh one.
    """
    packed = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = packed.config
    # of the GGUF file, not of the published model
    for leftover in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        vars(config).pop(leftover, None)
    config.rms_norm_eps = 1e-5  # GGUF keeps it in single precision: 9.999999747e-06
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    return model


def main() -> None:
    """Write the model and its tokenizer, chat template included."""
    gguf, output = Path(sys.argv[1]), Path(sys.argv[2])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with published_directory(output) as staging:
        load_dequantised(gguf).save_pretrained(staging)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(staging)


if __name__ == "__main__":
    main()
