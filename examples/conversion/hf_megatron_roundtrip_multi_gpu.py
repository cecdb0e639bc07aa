# SPDX-License-Identifier: Apache-2.0
"""The round trip of hf_megatron_roundtrip.py over several processes, with or without GPUs.

``torchrun --nproc-per-node 4 hf_megatron_roundtrip_multi_gpu.py --model-name ID --tp 2 --pp 2``
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("hf_megatron_roundtrip.py")), run_name="__main__")
