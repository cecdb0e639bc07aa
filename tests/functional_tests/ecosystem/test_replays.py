# SPDX-License-Identifier: Apache-2.0
"""RL and post-training frameworks run their plain path on one process and on two, with full weights and LoRA."""

import pytest
import torch
from safetensors.torch import load_file

from tests.functional_tests.ecosystem.replays import replay, sums
from tests.toy_models import make_llama

SIZES = {"vocab_size": 104, "num_hidden_layers": 2}
FULL = ["verl", "SkyRL", "miles", "AReaL", "ms-swift"]
LORA = ["verl", "SkyRL", "miles", "AReaL"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_llama(directory, **SIZES)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tied")
    return directory, make_llama(directory, tie_word_embeddings=True, **SIZES)


def run_both(framework, directory, tmp_path, pool, lora=False):
    """What one process gives, and what both of two give, with where each saved."""
    alone = replay(framework, directory, tmp_path / "one", 1, lora)
    both = pool.run(replay, framework, str(directory), str(tmp_path / "two"), 2, lora)
    return [(alone, tmp_path / "one"), *((found, tmp_path / "two") for found in both)]


def stored(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("framework", FULL)
def test_full_weights(framework, llama, tmp_path, two_workers, run_in_process):
    directory, hf = llama
    dtype = torch.bfloat16 if framework == "ms-swift" else torch.float32
    expected = sums((name, weight.to(dtype)) for name, weight in hf.state_dict().items())
    for sent, out in run_both(framework, directory, tmp_path, two_workers):
        assert not sent or sent == pytest.approx(expected)
        assert sums(stored(out).items()) == pytest.approx(expected)


@pytest.mark.parametrize("framework", LORA)
def test_lora(framework, llama, tmp_path, two_workers, run_in_process):
    import peft

    directory, hf = llama
    expected = sums(hf.state_dict().items())
    for sent, out in run_both(framework, directory, tmp_path, two_workers, lora=True):
        adapters = {name for name in sent if "lora_" in name}
        assert not any(name.startswith("base_model.") for name in adapters)
        base = {name: value for name, value in sent.items() if name not in adapters}
        assert not sent or base == pytest.approx(expected)
        if framework == "miles":
            assert sums(stored(out).items()) == pytest.approx(expected), (
                "B is zero, so merging changes nothing"
            )
        else:
            loaded = peft.PeftModel.from_pretrained(make_llama(**SIZES), str(out / "adapter"))
            assert any("lora_A" in name for name in loaded.state_dict())


def test_a_critic_of_a_tied_model(tied, tmp_path, two_workers, run_in_process):
    directory, hf = tied
    expected = sums(hf.model.state_dict(prefix="model.").items())
    for sent, out in run_both("verl critic", directory, tmp_path, two_workers):
        assert {
            name: value for name, value in sent.items() if name != "lm_head.weight"
        } == pytest.approx(expected)
        assert stored(out)["lm_head.weight"].shape == (1, hf.config.hidden_size)


def test_a_shard_becomes_its_part_of_the_tensor(llama, tmp_path, two_workers, run_in_process):
    found = [found for found, _ in run_both("verl delta", llama[0], tmp_path, two_workers)]
    assert found[0]["known"] == found[0]["all"]
    assert all(found[0]["all"] / 2 <= one["known"] < found[0]["all"] for one in found[1:])
