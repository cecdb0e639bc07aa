# SPDX-License-Identifier: Apache-2.0
"""Every tutorial is run as its README.md and tutorials.md say, and its outcome is looked at.

Scripts that follow each other share one interpreter here, because each would take seconds to start; those that
start processes of their own have one to themselves. All write into a folder that is thrown away.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.project.tree import ROOT

LLAMA, DATA = ROOT / "tutorials/recipes/llama", ROOT / "tutorials/data"
IN_A_ROW = [
    *(
        LLAMA / f"{name}.py"
        for name in ("00_quickstart_pretrain", "01_finetune_lora", "02_convert_and_compare")
    ),
    LLAMA / "03_custom_forward_step_and_callback.py",
    *(
        DATA / f"{name}.py"
        for name in ("00_text_to_blend", "01_chats_and_packing", "02_own_records")
    ),
]
OUT = Path("runs/tutorials")

RUNNER = """
import runpy, sys
for script in sys.argv[1:]:
    print("===", script.rpartition("/")[2], flush=True)
    runpy.run_path(script, run_name="__main__")
"""


def started(*command, folder):
    """What ``command`` printed, both streams; it must end well."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NEMORUN_HOME": str(folder)}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout


def losses(folder, kind="train"):
    """The logged losses of a run."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["lm loss"] for entry in entries if entry["kind"] == kind]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, output of each script), after all that run one after the other in one interpreter."""
    folder = tmp_path_factory.mktemp("ran")
    output = started(sys.executable, "-c", RUNNER, *map(str, IN_A_ROW), folder=folder)
    shown = re.split(r"^=== .*\n", output, flags=re.M)[1:]
    return folder, dict(zip([path.stem for path in IN_A_ROW], shown, strict=True))


@pytest.fixture
def pretrained(ran, tmp_path):
    """A folder of its own that looks as the first tutorial leaves it."""
    shutil.copytree(ran[0] / OUT, tmp_path / OUT)
    return tmp_path


def test_every_script_is_run_here():
    """A tutorial that nobody runs is not one."""
    names = {path.stem if path.is_file() else path.name for path in LLAMA.glob("0*")} | {
        path.stem for path in DATA.glob("0*")
    }
    text = Path(__file__).read_text()
    assert [name for name in names if text.count(name) < 1] == []
    readme = (LLAMA / "README.md").read_text() + (DATA / "README.md").read_text()
    assert [name for name in names if name not in readme] == []


@pytest.mark.slow
def test_the_reward_rises(tmp_path):
    output = started(sys.executable, str(ROOT / "tutorials/rl/policy_gradient.py"), folder=tmp_path)
    rewards = [float(found) for found in re.findall(r"reward (\S+),", output)]
    assert rewards[0] < 0.2 < 0.6 < rewards[-1]
    assert all(float(found) < 1e-4 for found in re.findall(r"differ by (\S+),", output))
    assert (tmp_path / "runs/tutorials/rl/reward.png").stat().st_size


@pytest.mark.slow
def test_a_model_learns_sums_from_a_reward(tmp_path):
    """The beginning of its curve."""
    script = str(ROOT / "tutorials/rl/grpo.py")
    output = started(sys.executable, script, "--steps", "60", folder=tmp_path)
    rewards = [float(found) for found in re.findall(r"reward right_sum (\S+)", output)]
    assert rewards[0] < 0.15 < 0.4 < rewards[-1]
    assert (tmp_path / "runs/tutorials/grpo/log/completions.html").stat().st_size


@pytest.mark.slow
def test_a_model_learns_to_name_colors(tmp_path):
    """The commands of tutorials/vision/README.md."""
    shapes = [str(tmp_path / "runs/tutorials/vision" / name) for name in ("pictures", "untrained")]
    started(sys.executable, str(ROOT / "scripts/demo/prepare_shapes.py"), *shapes, folder=tmp_path)
    sizes = ("model.seq_length=80", "dataset.seq_length=80", "dataset.do_test=false")
    preview = (
        "data",
        "preview",
        "qwen25_vl_3b_finetune_config",
        "--hf-model",
        shapes[1],
        "--data",
        shapes[0],
    )
    command = (
        sys.executable,
        "-m",
        "megatron.bridge.cli.main",
        *preview,
        "--html",
        "preview.html",
        *sizes,
    )
    started(*command, folder=tmp_path)
    assert "data:image" in (tmp_path / "preview.html").read_text()
    output = started(
        sys.executable, str(ROOT / "tutorials/vision/00_finetune_on_pictures.py"), folder=tmp_path
    )
    answers = re.findall(r"png: '(\w+) (\w+)', and is a (\w+) (\w+)", output)
    assert len(answers) == 6
    assert sum(said == right for said, _, right, _ in answers) >= 5
    assert (tmp_path / "runs/tutorials/vision/exported/preprocessor_config.json").exists()


# ---- tutorials/recipes/llama ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pretraining(ran):
    folder, output = ran
    found = losses(folder / OUT / "llama/pretrain")
    assert found[-1] < found[0] / 5
    assert "853,120 parameters\nThe light of Gull Rock is" in output["00_quickstart_pretrain"]
    assert "Warning" not in output["00_quickstart_pretrain"]  # of Megatron-Core, about nothing
    model = folder / OUT / "llama/hf"
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 1
    assert all(
        (model / name).stat().st_size
        for name in ("model.safetensors", "tokenizer.json", "README.md")
    )


@pytest.mark.slow
def test_adapters(ran):
    """Answers got better, held-out ones too, and peft makes the merged model of base and adapter."""
    folder, output = ran
    found, held_out = (
        losses(folder / OUT / "llama/lora"),
        losses(folder / OUT / "llama/lora", "validation"),
    )
    assert found[-1] < found[0] / 3
    assert held_out[-1] < found[0]
    answers = re.findall(r"^runs/\S+: (['\"].*['\"])$", output["01_finetune_lora"], flags=re.M)
    assert len(answers) == 2
    assert "light of" in answers[1]
    assert same_logits(folder / OUT / "llama")


def same_logits(folder):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, merged = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("hf", "merged")
    )
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder / "adapter")(ids).logits
        difference = (adapted - merged(ids).logits).abs().max()
    return difference < 1e-4 * adapted.std() < (before - adapted).abs().max()


@pytest.mark.slow
def test_conversion(ran):
    output = ran[1]["02_convert_and_compare"]
    assert float(re.search(r"two logits: (\S+) of their", output)[1]) < 1e-4
    assert (
        "6 files are byte for byte the same: README.md, chat_template.jinja, config.json, model.safetensors"
        in output
    )
    assert "QKVMapping" in output


@pytest.mark.slow
def test_own_loss_and_callback(ran):
    output = ran[1]["03_custom_forward_step_and_callback"]
    assert "focal loss" in output
    assert 20 < int(re.search(r"ended after (\d+) of 200 steps", output)[1]) < 200


@pytest.mark.slow
def test_conversion_over_two_processes(pretrained):
    script = LLAMA / "02_convert_and_compare.py"
    output = started("torchrun", "--standalone", "--nproc-per-node=2", script, folder=pretrained)
    assert "column/2" in output
    assert "6 files are byte for byte the same" in output


@pytest.mark.slow
def test_started_again_nothing_is_trained_again(pretrained):
    before = losses(pretrained / OUT / "llama/pretrain")
    output = started(sys.executable, LLAMA / "00_quickstart_pretrain.py", folder=pretrained)
    assert "resumed from" in output
    assert losses(pretrained / OUT / "llama/pretrain") == before


@pytest.mark.slow
def test_from_a_file(pretrained):
    """04_from_yaml: tensor parallel, then longer and pipeline parallel from the same checkpoint."""
    output = started("bash", LLAMA / "04_from_yaml/run.sh", folder=pretrained)
    assert "tensor 2 x pipeline 1" in output
    assert "resumed from runs/tutorials/llama/yaml/iter_0000040 at step 40" in output
    assert "pipeline_model_parallel_size: 2  # command line" in output
    found = losses(pretrained / OUT / "llama/yaml")
    assert found == sorted(found, reverse=True)


@pytest.mark.slow
def test_batch_script(tmp_path):
    """05_slurm without Slurm: what would run, for as many processes as the script asks Slurm for."""
    script = LLAMA / "05_slurm/pretrain_70b.sbatch"
    output = started("bash", script, "train.train_iters=1000", folder=tmp_path)
    assert "64 processes = tensor 8 with sequence parallelism x pipeline 2" in output
    text = script.read_text()
    nodes, tasks = (
        int(re.search(rf"#SBATCH --{name}=(\d+)", text)[1]) for name in ("nodes", "ntasks-per-node")
    )
    assert nodes * tasks == 64
    assert "train_iters: 1000  # command line" in output


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv-launch").is_dir(), reason="needs `make launch-setup`")
def test_nemo_run_script(tmp_path):
    output = started("bash", LLAMA / "05_slurm/with_nemo_run.sh", folder=tmp_path)
    assert "#SBATCH --nodes=8" in output
    assert "--recipe llama3_70b_pretrain_config" in output


# ---- tutorials/data ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blend(ran):
    assert (
        "of 200 training samples, 140 are from lighthouses and 60 from logbook"
        in ran[1]["00_text_to_blend"]
    )
    assert "24 documents" in ran[1]["00_text_to_blend"]


@pytest.mark.slow
def test_chats(ran):
    """The loss covers exactly the answers of the first conversation; packed rows are nearly full."""
    messages = json.loads((DATA / "chats/training.jsonl").read_text().splitlines()[0])["messages"]
    answers = [
        f"{message['content']}<|im_end|>\n"
        for message in messages
        if message["role"] == "assistant"
    ]
    output = ran[1]["01_chats_and_packing"]
    shown = output[output.index("<|im_start|>user") :].partition("\ntrain_on=")[0]
    assert re.findall(r"\[(.*?)\]", shown, flags=re.S) == answers
    trained = [int(number) for number in re.findall(r"train_on=\w+: (\d+) of", output)]
    assert trained[1] < trained[0] < trained[2]
    rows, fill = re.search(r"48 conversations fill (\d+) packed rows to (\d+)%", output).groups()
    assert int(rows) < 48 / 2
    assert int(fill) > 80


@pytest.mark.slow
def test_own_records(ran):
    assert "training: 16 samples, 4 dropped by process_example_fn" in ran[1]["02_own_records"]
    assert re.search(r"in the loss: '(white|red|green)<\|im_end\|>'", ran[1]["02_own_records"])


@pytest.mark.slow
def test_preparation_goes_on(tmp_path):
    """By the script's own assertions nothing looks finished after the kill, and the result is the same."""
    output = started(sys.executable, DATA / "03_resumable_preparation.py", folder=tmp_path)
    killed, behind = (
        int(number) for number in re.findall(r"(?:killed: |resumed after )(\d+) parts", output)
    )
    assert 3 <= killed <= behind < 9
    assert "number for number" in output


@pytest.mark.slow
def test_tokenizer_is_what_its_script_makes(tmp_path):
    started(sys.executable, DATA / "make_tokenizer.py", "made", folder=tmp_path)
    made, kept = (
        json.loads((path / "tokenizer.json").read_text())
        for path in (tmp_path / "made", DATA / "tokenizer")
    )
    assert made == kept
