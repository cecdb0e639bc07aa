# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge calibrate`` before and after the library runs; a stand-in for it writes a model."""

import json
import re
import stat
import sys

import pytest
import torch
from safetensors.torch import load_file

from megatron.bridge.cli.calibrate import _split
from megatron.bridge.cli.main import main
from megatron.bridge.cli.support.texts import token_ids
from megatron.bridge.models.surgery import calibration
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama

LETTERS = "abcdefghijklmnopqrstuvwxyz "
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}


def add_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: index for index, letter in enumerate(LETTERS)} | {"<end>": len(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def write_texts(path, count=20):
    lines = (json.dumps({"text": LETTERS[index % 20 :] * 2}) for index in range(count))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    make_llama(folder / "hf", dtype=torch.bfloat16, shard_size="1GB", **SIZES, **HEADS)
    add_tokenizer(folder / "hf")
    write_texts(folder / "texts.jsonl")
    return folder


STAND_IN = """#!{python}
import json, shutil, sys
from pathlib import Path
job = json.loads(Path(sys.argv[3]).read_text())
Path({record!r}).write_text(json.dumps(job))
for file in Path({written!r}).iterdir():
    shutil.copyfile(file, Path(job["output"], file.name))
"""


@pytest.fixture
def stand_in(model, tmp_path):
    """An interpreter that notes its job and writes what ``export --quantize int8`` writes."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(model / "hf")
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(chunks, tmp_path / "int8", show_progress=False, quantize="int8")
    script = tmp_path / "python"
    paths = {"record": str(tmp_path / "job.json"), "written": str(tmp_path / "int8")}
    script.write_text(STAND_IN.format(python=sys.executable, **paths))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script


def words(model, out, *more):
    return [
        *("calibrate", "--hf-model", str(model / "hf"), "--hf-path", str(out)),
        *("--texts", str(model / "texts.jsonl"), "--scheme", "W8A8", *more),
    ]


def test_the_job_and_the_report(model, tmp_path, stand_in, capsys):
    out = tmp_path / "out"
    options = ("--seq-length", "16", "--samples", "8", "--held-out", "3", "--method", "awq")
    kept = ("--keep-high", "*.mlp.down_proj.weight")
    assert main([*words(model, out, *options, *kept), "--python", str(stand_in)]) == 0
    job = json.loads((tmp_path / "job.json").read_text())
    assert (job["method"], job["scheme"]) == ("awq", "W8A8")
    assert job["in_full"] == ["lm_head", "model.layers.0.mlp.down_proj"]
    assert len(job["token_ids"]) == 8
    assert job["token_ids"][1] == list(range(1, 17))

    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert f"loss of {3 * 15} held-out tokens" in printed
    assert "7 matrices quantized" in printed
    full = calibration.held_out_loss(
        model / "hf", [list(range(index, index + 16)) for index in (8, 9, 10)]
    )
    assert f"{full:.4f} in full" in printed
    assert (out / "tokenizer.json").read_bytes() == (model / "hf/tokenizer.json").read_bytes()
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype is torch.int8


def refusals(model):
    return {
        "scheme": (["--scheme", "W5"], "--scheme W5 .*W4A16"),
        "pattern": (["--keep-high", "*.down_prj.*"], r"--keep-high '\*\.down_prj\.\*'"),
        "texts": (["--texts", str(model / "none.jsonl")], "none.jsonl is not a file"),
        "no library": (["--python", sys.executable], "llm-compressor is not installed.*--python"),
        "no interpreter": (["--python", str(model / "none")], "cannot be started.*--python"),
    }


@pytest.mark.parametrize("name", ["scheme", "pattern", "texts", "no library", "no interpreter"])
def test_refusals_leave_nothing_behind(model, tmp_path, capsys, name):
    more, message = refusals(model)[name]
    out = tmp_path / "out"
    assert main(words(model, out, *more)) == 1

    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_source_is_refused(model, tmp_path, stand_in, capsys):
    more = ("--hf-model", str(tmp_path / "int8"), "--python", str(stand_in))
    assert main(words(model, tmp_path / "out", *more)) == 1
    assert "compressed-tensors" in capsys.readouterr().err


def test_a_megatron_checkpoint_is_exported_first(model, tmp_path, stand_in):
    from megatron.bridge import AutoBridge

    AutoBridge.import_ckpt(model / "hf", tmp_path / "megatron", show_progress=False)
    more = ("--megatron-path", str(tmp_path / "megatron"), "--python", str(stand_in))
    assert main(words(model, tmp_path / "out", *more)) == 0
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["model"] != str(model / "hf")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("texts", "samples", "held_out", "sizes"),
    [(40, 30, 10, (30, 10)), (40, 40, 10, (36, 4)), (5, 512, 64, (4, 1)), (100, 5, 200, (5, 10))],
)
def test_held_out_texts_are_not_calibrated_on(tmp_path, texts, samples, held_out, sizes):
    rows = [[index, index] for index in range(texts)]
    calibrated, measured = _split(rows, samples, held_out, tmp_path)
    assert (len(calibrated), len(measured)) == sizes
    assert not {row[0] for row in calibrated} & {row[0] for row in measured}


def test_one_text_is_too_few(tmp_path):
    with pytest.raises(UserError, match=r"1 texts.*at least 2"):
        _split([[1, 2]], 1, 1, tmp_path)


class Words:
    """A tokenizer whose ids are lengths of words."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages, **options):
        assert options == {"tokenize": True, "return_dict": True}
        return self(" ".join(message["content"] for message in messages))


def test_texts_of_all_kinds(tmp_path):
    tokenizer = Words()
    plain = tmp_path / "texts.txt"
    plain.write_text("one three\n\ntwo\n")
    assert list(token_ids(tokenizer, plain, 8)) == [[3, 5], [3]]
    records = tmp_path / "records.jsonl"
    chat = [{"role": "user", "content": "a bc"}, {"role": "assistant", "content": "def"}]
    records.write_text(f"{json.dumps({'text': 'ab c d'})}\n{json.dumps({'messages': chat})}\n")
    with pytest.raises(UserError, match=r"records\.jsonl:2: messages need a chat template"):
        list(token_ids(tokenizer, records, 2))
    tokenizer.chat_template = "template"
    assert list(token_ids(tokenizer, records, 2)) == [[2, 1], [1, 2]]
    records.write_text("[1]\n")
    with pytest.raises(UserError, match=r"records\.jsonl:1: .*text or messages"):
        list(token_ids(tokenizer, records, 2))
