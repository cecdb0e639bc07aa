# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's plain path on one process and on two: import, training, checkpoints, refit, conversion."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.functional_tests.ecosystem import nemo_rl
from tests.toy_models import make_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nemo_rl")
    model = make_llama(directory, vocab_size=104, num_hidden_layers=2)
    words = {f"w{number}": number for number in range(104)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(directory)
    return directory, model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_policy(lora, llama, tmp_path, two_workers, run_in_process):
    directory, hf = llama
    norms, imported, trained = nemo_rl.replay(directory, tmp_path / "one", 1, lora)
    assert imported.keys() == hf.state_dict().keys()
    assert all(torch.equal(weight, hf.state_dict()[name]) for name, weight in imported.items())
    assert any(not torch.equal(weight, hf.state_dict()[name]) for name, weight in trained.items())
    both = two_workers.run(
        nemo_rl.replay, str(directory), str(tmp_path / "two"), 2 if lora else 1, lora, not lora
    )
    assert both[0][0] == pytest.approx(norms, rel=1e-4), (
        "data and tensor parallelism compute the same"
    )
    assert both[0][2].keys() == trained.keys()
    if not lora:
        dist.destroy_process_group()
        (iteration,) = (tmp_path / "two" / "weights").glob("iter_*")
        nemo_rl.convert_to_hf(directory, iteration, tmp_path / "hf")
        stored = {
            k: v
            for path in (tmp_path / "hf").glob("*.safetensors")
            for k, v in load_file(path).items()
        }
        assert stored.keys() == imported.keys()
        assert any(not torch.equal(stored[name], weight) for name, weight in imported.items())


def test_critic(llama, tmp_path, run_in_process):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sums = nemo_rl.replay_critic(llama[0], tmp_path, 1)
    assert any("output_layer" in name for name in sums[0])
