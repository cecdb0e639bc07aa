# SPDX-License-Identifier: Apache-2.0
"""Three local tasks of lm-evaluation-harness: the numbers of its own ``hf`` model, sample by sample."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megatron.bridge.cli.main import main
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/eval"  # where scripts/extra.sh installs it
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="no lm-eval: run scripts/extra.sh eval"
)

CHOICE = """
task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\n"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: {shots}
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: toy_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
ANSWER = """
task: toy_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e", "\\n\\n"], max_gen_toks: 20, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    words = [word for text in TEXT for word in text.split()]
    choice = [
        {
            "question": " ".join(words[i : i + 5]),
            "choices": [words[i], words[-i], "no"],
            "answer": i % 3,
        }
        for i in range(12)
    ]
    long = [{"text": " ".join(words[i:] + words[:i])} for i in range(0, 20, 5)]
    answers = [{"question": text[:20], "answer": "x"} for text in TEXT]
    for name, rows, template in (
        ("choice", choice, CHOICE),
        ("text", long, ROLLING),
        ("answer", answers, ANSWER),
    ):
        data = folder / f"{name}.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(template.format(data=data, shots=0))
    return folder


NAMES = ["toy_choice", "toy_text", "toy_answer"]


def reference(directory, tasks):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(str(directory), dtype="float32", device="cpu", batch_size=2)
    return lm_eval.simple_evaluate(
        model,
        tasks=NAMES,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )


@pytest.mark.parametrize(
    "layout",
    [[], *(pytest.param([layout, "2"], marks=pytest.mark.slow) for layout in ("--tp", "--pp"))],
)
def test_scores_are_those_of_the_hf_model(model_dir, tasks, tmp_path, layout):  # noqa: F811
    torch.set_num_threads(1)
    out = tmp_path / "out.json"
    options = [
        "--tasks",
        ",".join(NAMES),
        "--include-path",
        str(tasks),
        "--out",
        str(out),
        "--dtype",
        "float32",
    ]
    assert main(["eval", str(model_dir), *options, *layout, "--kv-memory", "16MB"]) == 0
    found, expected = json.loads(out.read_text()), reference(model_dir, tasks)
    for name in NAMES:
        pairs = list(zip(found["samples"][name], expected["samples"][name], strict=True))
        assert pairs
        for ours, theirs in pairs:
            compare(ours["resps"], theirs["resps"], name)
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-6, abs=1e-4), (
                    name,
                    metric,
                )


@pytest.mark.slow
def test_torchrun_starts_the_ranks(model_dir, tasks, tmp_path):  # noqa: F811
    options = [
        str(model_dir),
        "--tasks",
        "toy_choice",
        "--include-path",
        str(tasks),
        "--dtype",
        "float32",
    ]
    options += ["--tp", "2", "--kv-memory", "16MB"]
    assert main(["eval", *options, "--out", str(tmp_path / "alone.json")]) == 0
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
    ]
    command = [
        *launch,
        "megatron.bridge.cli.main",
        "eval",
        *options,
        "--out",
        str(tmp_path / "ranks.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(BESIDE)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [
        "task",
        "toy_choice",
        "toy_choice",
    ]
    found, expected = (
        json.loads((tmp_path / name).read_text()) for name in ("ranks.json", "alone.json")
    )
    assert found["results"] == expected["results"]


def compare(ours, theirs, name):
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        if isinstance(other, float):
            assert float(one) == pytest.approx(other, abs=1e-4), name
        else:
            assert str(one) == str(other), name


def flat(value):
    if isinstance(value, list | tuple):
        return [part for one in value for part in flat(one)]
    return [value]


def test_an_unknown_task_is_named(model_dir, tasks, capsys):  # noqa: F811
    options = ["--tasks", "toy_choise", "--include-path", str(tasks), "--kv-memory", "16MB"]
    assert main(["eval", str(model_dir), *options]) == 1
    assert "toy_choise" in (error := capsys.readouterr().err)
    assert "toy_choice" in error


def test_a_model_without_a_tokenizer_is_refused():
    from megatron.bridge.inference.evaluation.harness import HarnessModel

    class Bare:
        hf = None

    with pytest.raises(UserError, match="--tokenizer"):
        HarnessModel(Bare())
