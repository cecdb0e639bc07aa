# SPDX-License-Identifier: Apache-2.0
"""Samples with images that share rows have the gradients of transformers' own model, one sample at a time."""

import inspect
import re

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.data.finetuning.builder import build_finetuning_datasets
from megatron.bridge.data.loaders import collate
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.training.vlm_step import forward_step
from tests import vision_run

SEQUENCE = 192


def rows_of(folder, kind):
    """The training rows, in which samples share rows if ``kind`` is ``packed``."""
    packed = PackedSequenceSpecs(packed_sequence_size=SEQUENCE, pad_seq_to_mult=4)
    config = FinetuningDatasetConfig(
        dataset_root=str(folder / "data"),
        seq_length=SEQUENCE,
        hf_processor_path=str(folder),
        media_root=str(folder / "data"),
        packed_sequence_specs=packed if kind == "packed" else None,
    )
    return build_finetuning_datasets(
        config, DatasetRequest((1, 0, 0), HuggingFaceTokenizer(str(folder)))
    ).train.rows


def our_gradients(folder, kind):
    """Of the mean over all trained tokens, in double precision, under transformers' names."""
    bridge = AutoBridge.from_hf_pretrained(folder)
    (model,) = bridge.to_megatron_model(wrap_with_ddp=False)
    model.double().config.params_dtype = torch.float64
    total, count, rows = 0, 0, rows_of(folder, kind)
    assert kind == "padded" or len(rows) < len(rows_of(folder, "padded")) / 2
    for place in range(len(rows)):
        _, batch = collate([(place, rows[place])])
        batch["media"] = {
            name: value.double() if value.is_floating_point() else value
            for name, value in batch["media"].items()
        }
        output, loss_function = forward_step(iter([batch]), model)
        loss, tokens, _ = loss_function(output)
        total, count = total + loss.double(), count + tokens
    (total / count).backward()
    for parameter in model.parameters():
        parameter.data = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        )
        parameter.grad = None
    return {
        name: weight.double()
        for name, weight in bridge.export_hf_weights([model], show_progress=False)
    }


def reference_gradients(folder):
    """The same of transformers' model."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    rows, total, count = rows_of(folder, "padded"), 0, 0
    known = inspect.signature(model.forward).parameters
    for sample in rows.samples:
        ids = torch.from_numpy(sample.tokens).long()[None]
        types = torch.isin(ids, torch.tensor(rows.media.token_ids)).long()
        given = {
            "mm_token_type_ids": types,
            "token_type_ids": types,
            **rows.media.pixels(sample.images),
        }
        given = {name: value for name, value in given.items() if name in known}
        given = {
            name: value.double() if value.is_floating_point() else value
            for name, value in given.items()
        }
        logits = model(input_ids=ids, **given).logits[0, :-1]
        trained = torch.from_numpy(sample.trained[1:])
        total = total + torch.nn.functional.cross_entropy(
            logits[trained], ids[0, 1:][trained], reduction="sum"
        )
        count += int(trained.sum())
    (total / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("gemma3_vl", marks=pytest.mark.slow)])
def test_gradients_equal_transformers_in_double_precision(run_in_process, tmp_path, name):
    folder = vision_run.write(name, tmp_path / name)
    redraw_zeros(folder)
    expected = {
        short(key): gradient
        for key, gradient in reference_gradients(folder).items()
        if gradient is not None
    }
    largest = max(gradient.norm() for gradient in expected.values())
    for kind in ("packed", "padded"):
        found = {short(key): gradient for key, gradient in our_gradients(folder, kind).items()}
        for key, gradient in expected.items():
            # a bias of keys changes nothing: its gradient is noise
            error = (found[key] - gradient).norm() / max(gradient.norm(), 1e-3 * largest)
            assert error <= 1e-6, f"{kind} {key}: {error:.1e}"


def redraw_zeros(folder):
    """Gemma's projector is drawn as zeros, through which the tower gets no gradient."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def short(name):
    """A name of a module or of a file, without the parts in which both differ."""
    return re.sub(r"\b(model|language_model|visual|vision_model)\.", "", name)
