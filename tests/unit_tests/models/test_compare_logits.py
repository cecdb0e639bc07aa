# SPDX-License-Identifier: Apache-2.0
"""What is recorded of transformers' models, whatever they call their layers."""

import pytest
import torch

from megatron.bridge.models.conversion.check import compare_logits
from tests.families.own_models import model_class
from tests.families.rows import ONE_FOR_EACH


@pytest.mark.sampled
@pytest.mark.parametrize("model", sorted(ONE_FOR_EACH))
def test_the_output_of_every_layer_is_recorded(model):
    row = ONE_FOR_EACH[model]
    kind = model_class(row.model)
    built = kind(kind.config_class(**row.config)).eval()
    hidden = compare_logits.run_hf(built, torch.arange(24)[None]).hidden
    layers = built.config.get_text_config().num_hidden_layers
    assert list(hidden) == [
        compare_logits.EMBEDDING,
        *(f"layer {index}" for index in range(layers)),
    ]
