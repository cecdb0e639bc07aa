# SPDX-License-Identifier: Apache-2.0
"""``plan``, ``inspect`` and ``verify``, on a tiny Llama in both formats."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.cli.support import logits
from megatron.bridge.models.conversion.check import compare_logits
from megatron.bridge.models.hf_pretrained.model_folder import RECORD
from megatron.bridge.utils.console import console
from tests.toy_models import make_llama

SHARD = "model-00001-of-{:05d}.safetensors"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """(Hugging Face directory, Megatron directory) of the same model."""
    hf, megatron = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("megatron")
    make_llama(hf, num_hidden_layers=2, tie_word_embeddings=True)
    (hf / "tokenizer.json").unlink()
    assert main(["convert", "--hf-model", str(hf), "--megatron-path", str(megatron)]) == 0
    return hf, megatron


def test_convert_and_export_give_the_same_model_back(places, tmp_path):
    hf, megatron = places
    arguments = [
        "--hf-model",
        str(hf),
        "--megatron-path",
        str(megatron),
        "--hf-path",
        str(tmp_path / "out"),
    ]
    assert main(["export", *arguments]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written - {RECORD} == {path.name for path in hf.iterdir()}


def test_the_plan_is_folded_over_layers(places, capsys):
    assert main(["plan", "--hf-model", str(places[0])]) == 0
    text = capsys.readouterr().out
    assert "layers.1." not in text
    assert "decoder.layers.*.mlp.linear_fc1.weight" in text
    assert "QKVMapping" in text
    assert "every one is mapped once" in text


def test_a_config_alone_has_a_plan(places, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((places[0] / "config.json").read_bytes())
    assert main(["plan", "--hf-model", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "QKVMapping" in text
    assert "there are no weights to compare the names with" in text


def test_the_full_plan_names_every_parameter(places, capsys):
    assert main(["plan", "--hf-model", str(places[0]), "--full"]) == 0
    text = capsys.readouterr().out
    for layer in range(2):
        assert f"model.layers.{layer}.self_attn.q_proj.weight" in text


def test_both_formats_have_the_same_number_of_parameters(places, capsys):
    numbers = []
    for place in places:
        assert main(["inspect", str(place), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        numbers.append(sum(torch.Size(tensor["shape"]).numel() for tensor in found["tensors"]))
    assert numbers[0] == numbers[1] > 0


def test_inspect_prints_the_format(places, capsys):
    assert main(["inspect", str(places[1]), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "Megatron checkpoint" in text
    assert "iteration" in text
    assert "decoder" in text


def test_inspect_refuses_what_is_neither(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"{tmp_path} is not a checkpoint" in message
    assert "config.json" in message


def test_a_certificate_says_that_both_are_the_same(places, tmp_path):
    hf, megatron = places
    assert main(["verify", str(hf), str(megatron), "--certificate", str(tmp_path / "c.json")]) == 0
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert certificate["holds"]
    assert certificate["logits"]["largest"] < 1e-3
    assert set(certificate["tensors"]) == set(AutoBridge.from_hf_pretrained(hf).hf_pretrained.state)
    assert all(
        proof["equal"] and len(proof["sha256"]) == 64 for proof in certificate["tensors"].values()
    )


def test_half_precision_is_judged_by_what_it_does_to_transformers(tmp_path, monkeypatch):
    """Where bf16 moves logits by more than the tolerance, an equal model passes and another function does not."""
    monkeypatch.setitem(logits.TOLERANCES, "bfloat16", 1e-6)
    hf, megatron = tmp_path / "hf", str(tmp_path / "megatron")
    make_llama(hf, num_hidden_layers=2, dtype=torch.bfloat16)
    (hf / "tokenizer.json").unlink()
    assert main(["convert", "--hf-model", str(hf), "--megatron-path", megatron]) == 0
    with console().capture() as printed:
        assert main(["verify", str(hf), megatron]) == 0
    assert "bfloat16 changes the logits of transformers by" in printed.get()
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with console().capture() as printed:
        assert main(["verify", str(hf), megatron]) == 1
    assert "differs" not in printed.get()
    assert "NOT the same model" in printed.get()


def test_a_router_that_rounds_to_another_expert_is_judged_in_float32(tmp_path, monkeypatch):
    """In half precision such a token differs by more than rounding does to the others."""
    run, calls = compare_logits.run_megatron, []

    def rounded(chunks, ids):
        outputs = run(chunks, ids)
        if not calls:
            outputs.logits[0, 1] += 1
        calls.append(outputs)
        return outputs

    monkeypatch.setattr(compare_logits, "run_megatron", rounded)
    hf, megatron = tmp_path / "hf", str(tmp_path / "megatron")
    make_llama(hf, num_hidden_layers=2, dtype=torch.bfloat16)
    assert main(["convert", "--hf-model", str(hf), "--megatron-path", megatron]) == 0
    assert main(["verify", str(hf), megatron, "--certificate", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["logits"]["largest"] < 1e-4
    assert len(calls) == 2


def test_one_other_bit_is_named(places, tmp_path):
    hf, megatron = places
    other = tmp_path / "hf"
    other.mkdir()
    for path in hf.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    name = "model.layers.1.mlp.down_proj.weight"
    index = json.loads((other / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(other / index[name])
    tensors[name][0, 0] = tensors[name][0, 0].nextafter(torch.tensor(9.0))
    save_file(tensors, other / index[name], metadata={"format": "pt"})
    with console().capture() as printed:
        code = main(
            [
                "verify",
                str(other),
                str(megatron),
                "--skip-logits",
                "--certificate",
                str(tmp_path / "c.json"),
            ]
        )
    assert code == 1
    assert f"tensor {name} differs" in printed.get()
    proofs = json.loads((tmp_path / "c.json").read_text())["tensors"]
    assert [key for key, proof in proofs.items() if not proof["equal"]] == [name]


def test_what_is_recomputed_need_not_be_in_the_model(places, tmp_path):
    hf, megatron = copied(places[0], tmp_path / "hf"), places[1]
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    name, file = "model.layers.0.self_attn.rotary_emb.inv_freq", min(index["weight_map"].values())
    save_file({**load_file(hf / file), name: torch.ones(8)}, hf / file, metadata={"format": "pt"})
    index["weight_map"][name] = file
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["verify", str(hf), str(megatron), "--skip-logits"]) == 0


def test_dtypes_that_nobody_declares(tmp_path):
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    make_llama(hf, num_hidden_layers=2, dtype=torch.bfloat16)
    (hf / "tokenizer.json").unlink()
    for file in hf.glob("*.safetensors"):
        tensors = {
            name: it.float() if "norm" in name else it for name, it in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((hf / "config.json").read_text())
    del config["dtype"]
    (hf / "config.json").write_text(json.dumps(config))
    assert main(["convert", "--hf-model", str(hf), "--megatron-path", str(megatron)]) == 0
    assert main(["verify", str(hf), str(megatron)]) == 0


def copied(place, target):
    shutil.copytree(place, target)
    return target


def only(place, pattern):
    (found,) = place.rglob(pattern)
    return found


def test_inspect_says_which_file_holds_a_tensor(places, capsys):
    assert main(["inspect", str(places[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {tensor["file"] for tensor in found["tensors"]} == {"__0_0.distcp"}
    assert found["facts"]["iteration"] == "0 (published: 0)"


def test_inspect_lists_a_checkpoint_of_another_program(places, tmp_path, capsys):
    other = copied(places[1], tmp_path / "megatron")
    only(other, "run_config.yaml").unlink()
    for place in (other, other / "iter_0000000"):
        assert main(["inspect", str(place), "--tensors"]) == 0
        text = capsys.readouterr().out
        assert "no run_config.yaml" in text
        assert "linear_qkv" in text


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("kind", "pattern", "damage", "message"),
    [
        (0, "model-00002-*", Path.unlink, "lacks model-00002"),
        (0, "model-00002-*", truncate, "model-00002-of-00006.safetensors is truncated"),
        (1, "*.distcp", Path.unlink, "__0_0.distcp is missing"),
        (1, "*.distcp", truncate, "is damaged: __0_0.distcp has"),
        (1, ".metadata", truncate, ".metadata cannot be read"),
    ],
)
def test_damage_is_named_by_inspect_and_by_verify(
    places, tmp_path, capsys, kind, pattern, damage, message
):
    damaged = list(places)
    damaged[kind] = copied(places[kind], tmp_path / "damaged")
    damage(only(damaged[kind], pattern))
    for command in (
        ["inspect", damaged[kind]],
        ["verify", *damaged],
        ["verify", *damaged, "--skip-logits"],
    ):
        assert main([*map(str, command)]) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert message in error or (command[0] == "verify" and ".metadata" in error)


def test_places_that_are_not_there(places, tmp_path, capsys):
    hf, megatron = map(str, places)
    absent = str(tmp_path / "absent")
    for command in (["inspect", absent], ["verify", absent, megatron], ["verify", hf, absent]):
        assert main(command) == 1
        assert "does not exist" in capsys.readouterr().err
    assert main(["inspect", str(places[0] / "config.json")]) == 1
    assert "config.json is not a checkpoint" in capsys.readouterr().err
    assert main(["verify", megatron, hf]) == 1
    assert "is not a Hugging Face model" in capsys.readouterr().err


def test_a_certificate_that_cannot_be_written_is_refused_at_once(places, tmp_path, capsys):
    assert (
        main(["verify", *map(str, places), "--certificate", str(tmp_path / "no" / "c.json")]) == 1
    )
    assert "c.json cannot be written" in " ".join(capsys.readouterr().err.split())


def test_tensors_alone_are_compared_without_the_model(places, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoBridge, "load_megatron_model", None)
    with console().capture() as printed:
        command = [
            "verify",
            *map(str, places),
            "--skip-logits",
            "--certificate",
            str(tmp_path / "c.json"),
        ]
        assert main(command) == 0
    assert "Comparing: 20 done" in printed.get()
    assert "20 of 20 tensors are bitwise equal" in printed.get()
    assert json.loads((tmp_path / "c.json").read_text())["logits"] is None
