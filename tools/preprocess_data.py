# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge data preprocess`` as a script, at the place and with the arguments of Megatron-LM's.

python tools/preprocess_data.py --input corpus.jsonl --tokenizer-model DIR --output-prefix data/corpus
"""

import sys

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "preprocess", *sys.argv[1:]]))
