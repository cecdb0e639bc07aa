# SPDX-License-Identifier: Apache-2.0
"""A real tokenizer, small enough to be trained here."""

import pytest
from hypothesis import settings

from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

settings.register_profile("shared", deadline=None)  # a busy machine is no failure
settings.load_profile("shared")

TEXT = [
    "The quality of mercy is not strained, it droppeth as the gentle rain from heaven.",
    "To be, or not to be: that is the question! Whether 'tis nobler in the mind to suffer",
    "Once more unto the breach, dear friends, once more; or close the wall up.  \n\tIn peace",
    "Grüße an die Königin: 12,345 crowns — naïve café, 日本語 and emoji 🙂 too.",
]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A byte-level BPE tokenizer with BOS and EOS, saved as a checkpoint has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    """The same, loaded."""
    return HuggingFaceTokenizer(str(tokenizer_dir))
