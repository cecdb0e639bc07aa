# SPDX-License-Identifier: Apache-2.0
"""Tokenize text into Megatron-Core's indexed format: ``megatron-bridge data preprocess`` as a script.

python scripts/data/preprocess_data.py --input corpus.jsonl --tokenizer-model DIR --output-prefix data/corpus
"""

import sys

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "preprocess", *sys.argv[1:]]))
