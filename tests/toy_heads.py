# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face models with heads."""

import torch

from tests.toy_models import LLAMA, randomise, tokens

_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
_GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)

CLASSES = {
    "LlamaForSequenceClassification": ("LlamaConfig", {}),
    "LlamaForTokenClassification": ("LlamaConfig", {}),
    "Qwen2ForSequenceClassification": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3ForTokenClassification": ("Qwen3Config", {"tie_word_embeddings": True}),
    "Qwen3Model": ("Qwen3Config", {}),
    "Gemma2ForSequenceClassification": (
        "Gemma2Config",
        {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    ),
    "GPT2ForTokenClassification": ("GPT2Config", {**_GPT2, "classifier_dropout": 0.0}),
    "GPT2Model": ("GPT2Config", _GPT2),
    "Qwen3MoeForSequenceClassification": ("Qwen3MoeConfig", _EXPERTS),
}
"""Name of transformers' class -> its config class and what is special about the toy."""


def make(name, directory=None, num_labels=5, **changes):
    """A model of the transformers class ``name``, every number random; saved if ``directory`` is given."""
    import transformers

    torch.manual_seed(0)
    config, own = CLASSES[name]
    sizes = {} if name.startswith("GPT2") else LLAMA
    labels = {} if name.endswith("Model") else {"num_labels": num_labels}
    values = {**sizes, "pad_token_id": 0, **own, **labels, **changes}
    model = getattr(transformers, name)(getattr(transformers, config)(**values)).eval()
    randomise(model)
    if directory is not None:
        model.save_pretrained(directory)
    return model


@torch.no_grad()
def expected(model, ids):
    """What transformers computes: scores of the sequence or of each token, or hidden states."""
    found = model(input_ids=ids)
    return found.last_hidden_state if "logits" not in found else found.logits


def as_transformers(output, wanted):
    """Our output in the shape of transformers': a classifier of sequences scores the last token."""
    return output if output.shape == wanted.shape else output[:, -1]


def ids_without_padding():
    """Token ids [rows, length], none of them the padding."""
    return tokens()[0].clamp(min=1)
