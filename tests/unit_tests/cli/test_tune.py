# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge tune``: its layouts pass the rules of a run, which takes its output; mistakes are named."""

import json
import pickle

import pytest

from megatron.bridge.cli.main import main

RECIPE = ["--recipe", "llama32_1b_pretrain_config", "--gpus", "8", "--gpu", "h100"]


def tune(capsys, *arguments):
    code = main(["tune", *RECIPE, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    return folder / "tuned.yaml", folder / "report.html"


def test_output_is_a_config_that_a_run_takes(capsys, ranked):
    tuned, report = ranked
    code, out, _ = tune(
        capsys, "--json", "--top", "3", "--output", str(tuned), "--report", str(report)
    )
    assert code == 0
    found = json.loads(out)
    seconds = [layout["step_seconds"] for layout in found["layouts"]]
    assert seconds == sorted(seconds)
    assert len(seconds) == 3
    for layout in found["layouts"]:
        assert sum(layout["split"].values()) == pytest.approx(layout["step_seconds"])
        assert max(layout["bytes"]) <= 80e9
        assert layout["interval"][0] < layout["step_seconds"] < layout["interval"][1]
    assert main(["train", "--config", str(tuned), "--dry-run", "--world-size", "8"]) == 0
    assert "<svg" in report.read_text()


def test_the_memory_of_the_best_layout_is_named(capsys):
    few = ["--fixed", "pipeline=1", "context=1", "tensor=1", "micro_batch=1", "--top", "1"]
    lines = tune(capsys, *few)[1].splitlines()
    start = next(
        place
        for place, line in enumerate(lines)
        if line.startswith("the fullest GPU of the best one, ")
    )
    whole = float(lines[start].split()[-2])
    parts = {
        name: float(size)
        for size, _, name in (line.partition(" GB  ") for line in lines[start + 1 : start + 6])
    }
    assert sum(parts.values()) == pytest.approx(whole, abs=0.3)
    assert parts["NCCL, 4 communicators"] == 1.7


def test_fixed_dimensions_stay(capsys):
    code, out, _ = tune(
        capsys, "--json", "--top", "2", "--fixed", "tensor=2", "pipeline=2", "context=1"
    )
    assert code == 0
    assert all("TP2 PP2" in layout["layout"] for layout in json.loads(out)["layouts"])


def test_what_changes_numbers_is_searched_only_if_freed(capsys):
    few = ["--json", "--top", "1", "--fixed", "pipeline=1", "context=1", "micro_batch=1"]
    (plain,) = json.loads(tune(capsys, *few)[1])["layouts"]
    assert not [
        each
        for each in plain["overrides"]
        if "grad_reduce_in_fp32" in each or "global_batch" in each
    ]
    (freed,) = json.loads(tune(capsys, *few, "--free", "gradients", "batch")[1])["layouts"]
    assert "ddp.grad_reduce_in_fp32=false" in freed["overrides"]
    assert [each for each in freed["overrides"] if each.startswith("train.global_batch_size=")]
    assert freed["tokens_per_second"] > plain["tokens_per_second"]
    code, _, err = tune(capsys, "--free", "precision")
    assert code
    assert "gradients" in err


def test_messages_are_overlapped_where_that_is_faster(capsys):
    _, out, _ = tune(
        capsys, "--json", "--top", "1", "--fixed", "tensor=8", "pipeline=1", "context=1"
    )
    (layout,) = json.loads(out)["layouts"]
    assert "model.tp_comm_overlap=true" in layout["overrides"]


def test_explain_says_why_a_layout_loses(capsys):
    code, out, _ = tune(capsys, "--fixed", "pipeline=1", "context=1", "--explain", "tensor=8")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("  TP8")]
    assert "slower" in line or "GB more than the budget" in line


def test_fix_oom_changes_little(capsys):
    code, out, _ = tune(capsys, "--fix-oom", "train.micro_batch_size=8", "--budget", "memory=40GB")
    assert code == 0
    assert "saves" in out
    assert "GB" in out


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.20 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved."
)


def _snapshot(path, peak):
    freed = [{"action": "alloc", "size": 9}, {"action": "free_completed", "size": 9}]
    state = {"segments": [{"allocated_size": peak - 9}], "device_traces": [freed]}
    path.write_bytes(pickle.dumps(state))


def test_fix_oom_follows_what_a_run_needed(capsys, tmp_path):
    few = ["--fixed", "pipeline=1", "expert=1"]
    assert "the layout of the config fits" in tune(capsys, "--fix-oom", *few)[1]
    (tmp_path / "log.txt").write_text(f"step 1\n{OOM}\n")
    _, out, _ = tune(capsys, "--fix-oom", str(tmp_path / "log.txt"), *few)
    assert "saves" in out
    _snapshot(tmp_path / "snapshot.pickle", 72 * 2**30)
    assert tune(capsys, "--fix-oom", str(tmp_path / "snapshot.pickle"), *few)[1] == out
    for name, words in {"none.txt": "none.txt", "other.txt": "Tried to allocate"}.items():
        (tmp_path / "other.txt").write_text("no error")
        code, _, err = tune(capsys, "--fix-oom", str(tmp_path / name))
        assert code == 1
        assert words in err


def test_unbalanced_experts_cost_time_and_memory(capsys):
    few = [
        "--recipe",
        "qwen3_30b_a3b_pretrain_config",
        "--fixed",
        "pipeline=2",
        "tensor=1",
        "expert=8",
        "context=1",
    ]
    few += ["virtual=1", "micro_batch=1", "--top", "1", "--json"]
    found = []
    for imbalance in ("1", "1.5"):
        assert main(["tune", *few, "--imbalance", imbalance]) == 0
        found.append(json.loads(capsys.readouterr().out)["layouts"][0])
    assert found[1]["step_seconds"] > found[0]["step_seconds"]
    assert max(found[1]["bytes"]) > max(found[0]["bytes"])


def test_what_a_model_itself_refuses_is_a_refused_layout(capsys):
    few = [
        "--fixed",
        "tensor=2",
        "pipeline=1",
        "context=1",
        "virtual=1",
        "expert=8",
        "micro_batch=1",
    ]
    odd = "model.kv_lora_rank=511"
    recipe = ["--recipe", "deepseek_v2_lite_pretrain_config", "--gpus", "8", "--gpu", "h100"]
    assert main(["tune", *recipe, *few, odd]) == 1
    assert "does not divide kv_lora_rank" in capsys.readouterr().err


def test_a_cluster_has_links_of_its_own(capsys, tmp_path):
    path = tmp_path / "slow.json"
    few = ["--recipe", "llama32_1b_pretrain_config", "--fixed", "pipeline=1", "tensor=1", "--json"]
    path.write_text('{"gpu": "h100", "gpus": 16, "network": 0.5}')
    assert main(["tune", "--cluster", str(path), *few]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert main(["tune", "--gpus", "16", "--gpu", "h100", *few]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert slow["gpus"] == 16
    assert slow["layouts"][0]["step_seconds"] > 1.05 * usual["layouts"][0]["step_seconds"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["gpu"]),
        ('{"gpu": "h100", "gpu_count": 2}', ["gpu_count"]),
        ('{"gpu": "h100", "network": 0}', ["network=0"]),
    ],
)
def test_a_wrong_cluster_is_named(capsys, tmp_path, text, words):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    assert main(["tune", "--cluster", str(path), "--recipe", "llama32_1b_pretrain_config"]) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in [str(path), *words]), err


MISTAKES = [
    (["--gpu", "h101"], ["h101", "H100 80GB"]),
    (["--gpu", "a100"], ["A100 40GB", "A100 80GB"]),
    (["--fixed", "tensr=8"], ["--fixed tensr=8", "tensor"]),
    (["--fixed", "tensor=x"], ["--fixed tensor=x", "tensor=2"]),
    (["--fixed", "tensor=2", "tensor=4"], ["--fixed tensor=4", "2"]),
    (["--budget", "72"], ["--budget 72", "memory=72GB"]),
    (["--budget", "memory=500GB"], ["--budget memory=500GB", "80 GB"]),
    (["--budget", "memory=1GB"], ["1.0 GB", "8 GPUs"]),
    (["--gpus", "7", "--fixed", "tensor=8"], ["7"]),
    (["--explain", "--fix-oom"], ["--fix-oom", "--explain"]),
    (["--imbalance", "0.5"], ["--imbalance 0.5", "1.3"]),
    (["--calibrated"], ["--calibrated", "--ledger"]),
    (["--explain", "speed=2"], ["--explain speed=2", "micro_batch"]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:30])
def test_mistakes_name_the_value_and_the_way_out(capsys, arguments, words):
    code, _, err = tune(capsys, *arguments)
    assert code == 1
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_layouts_that_the_rules_of_a_run_refuse_make_room_for_others(capsys):
    """The stages of a hybrid model are even, so its fastest layouts may not be possible."""
    hybrid = ["--recipe", "nemotronh_8b_pretrain_config", "--gpus", "16", "--gpu", "h100"]
    assert (
        main(["tune", *hybrid, "--json", "--top", "1", "--fixed", "context=1", "micro_batch=1"])
        == 0
    )
    assert len(json.loads(capsys.readouterr().out)["layouts"]) == 1


def test_layouts_within_the_doubt_are_said_to_be_equal(capsys):
    few = ["--fixed", "pipeline=1", "context=1", "tensor=1"]
    _, out, _ = tune(capsys, *few, "--top", "3")
    assert "layouts 1 to " in out
    assert "--probe " in out
    _, out, _ = tune(capsys, *few, "--top", "1")
    assert "--probe" not in out
