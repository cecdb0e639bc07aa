# SPDX-License-Identifier: Apache-2.0
"""Scores and embeddings against transformers' classes, in Python and through the server with OpenAI's client."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoTokenizer

from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.pooling import PooledModel
from megatron.bridge.utils.errors import UserError
from tests.scripted_server import BESIDE, HAS_SERVER
from tests.toy_heads import make
from tests.toy_models import make_llama
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.project.tree import ROOT

TEXTS = [TEXT[0], TEXT[1][:9], TEXT[2]]
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
SERVER = pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer_dir):  # noqa: F811
    """Folders with a classifier, a reward model and an embedding model."""
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": len(hf), "pad_token_id": 0}
    classes = {"id2label": LABELS, "label2id": {label: key for key, label in LABELS.items()}}
    make("LlamaForSequenceClassification", folder / "classes", 3, **sizes, **classes)
    make("LlamaForSequenceClassification", folder / "reward", 1, **sizes)
    make("Qwen3Model", folder / "embedding", **sizes)
    for name in ("classes", "reward", "embedding"):
        hf.save_pretrained(folder / name)
    return folder


def scores_of(folder, ids):
    """What transformers computes for each text alone."""
    kind = "AutoModel" if folder.name == "embedding" else "AutoModelForSequenceClassification"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        outputs = [model(input_ids=torch.tensor([tokens])) for tokens in ids]
    if kind == "AutoModel":
        return [output.last_hidden_state[0] for output in outputs]
    return [output.logits[0] for output in outputs]


@pytest.mark.parametrize("name", ["classes", "reward"])
def test_scores_are_those_of_transformers(models, name):
    hf = AutoTokenizer.from_pretrained(models / name)
    with PooledModel(str(models / name), dtype="float32") as model:
        pooled = model.pool(TEXTS)
        assert model.facts.labels == (tuple(LABELS.values()) if name == "classes" else ("LABEL_0",))
    for scores, expected in zip(
        pooled, scores_of(models / name, map(hf.encode, TEXTS)), strict=True
    ):
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["last_token", "mean"])
def test_embeddings_are_those_of_transformers(models, tmp_path, pooling):
    """The pooling comes from the file of the sentence-transformers library."""
    folder = tmp_path / "embedding"
    folder.symlink_to(models / "embedding")
    declared = models / "embedding/1_Pooling"
    declared.mkdir(exist_ok=True)
    flags = {"pooling_mode_mean_tokens": pooling == "mean"}
    flags["pooling_mode_lasttoken"] = pooling == "last_token"
    (declared / "config.json").write_text(json.dumps(flags))
    hf = AutoTokenizer.from_pretrained(folder)
    with PooledModel(str(folder), dtype="float32") as model:
        pooled = model.pool(TEXTS)
    for vector, states in zip(pooled, scores_of(folder, map(hf.encode, TEXTS)), strict=True):
        expected = states.mean(0) if pooling == "mean" else states[-1]
        torch.testing.assert_close(vector, F.normalize(expected, dim=0), rtol=1e-5, atol=1e-5)


def test_a_language_model_embeds(tmp_path, tokenizer_dir):  # noqa: F811
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    make_llama(tmp_path, vocab_size=len(hf))
    hf.save_pretrained(tmp_path)
    with PooledModel(str(tmp_path), embed=True, dtype="float32") as model:
        (vector,) = model.pool(TEXTS[:1])
    reference = transformers.LlamaModel.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        states = reference(input_ids=torch.tensor([hf.encode(TEXTS[0])])).last_hidden_state[0]
    torch.testing.assert_close(vector, F.normalize(states[-1], dim=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": "mean"}, ["pooling='mean'", "sequence_classification"]),
        ({"max_context": 4096}, ["max_context=4096"]),
    ],
)
def test_options_without_effect_are_named(models, options, words):
    with pytest.raises(UserError) as error:
        PooledModel(str(models / "classes"), **options)
    assert all(word in str(error.value) for word in words)


def test_empty_and_long_texts_are_named(models):
    with PooledModel(str(models / "classes"), max_context=4) as model:
        outside = model.facts.vocabulary
        for text, words in (
            ([], "text 0 is empty"),
            ([1] * 5, "text 0 has 5 tokens"),
            ([1, outside], f"text 0: token {outside}"),
            ([-1], "text 0: token -1"),
        ):
            with pytest.raises(UserError, match=words):
                model.pool([text])


def test_what_generates_names_the_way_out(models):
    with pytest.raises(UserError, match="PooledModel"):
        LLM(str(models / "classes"))


@contextmanager
def served(folder, *options):
    """The address of a server."""
    command = [sys.executable, "-m", "megatron.bridge.cli.main", "serve", str(folder)]
    command += ["--dtype", "float32", "--port", "0", "--name", "toy", *options]
    variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{BESIDE}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving toy at http://127.0.0.1:"), line
            yield line.split()[-1]
        finally:
            process.terminate()


def post(address, path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]


@pytest.mark.sampled
@SERVER
def test_served_embeddings(models):
    from openai import BadRequestError, NotFoundError, OpenAI

    folder = models / "embedding"
    hf = AutoTokenizer.from_pretrained(folder)
    with PooledModel(str(folder), dtype="float32", pooling="mean") as model:
        expected = [vector.numpy() for vector in model.pool(TEXTS)]
    with served(folder, "--pooling", "mean") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["toy"]
        answer = client.embeddings.create(model="toy", input=TEXTS)  # the client asks for base64
        for item, vector in zip(answer.data, expected, strict=True):
            np.testing.assert_allclose(item.embedding, vector, rtol=1e-5, atol=1e-6)
        ids = hf.encode(TEXTS[0])
        assert answer.usage.prompt_tokens == sum(len(hf.encode(text)) for text in TEXTS)
        short = client.embeddings.create(
            model="toy", input=[ids], dimensions=8, encoding_format="float"
        )
        first = expected[0][:8] / np.linalg.norm(expected[0][:8])
        np.testing.assert_allclose(short.data[0].embedding, first, rtol=1e-5, atol=1e-6)
        scores = post(address, "/score", text_1=TEXTS[0], text_2=TEXTS)["data"]
        cosines = [float(expected[0] @ vector) for vector in expected]
        np.testing.assert_allclose([item["score"] for item in scores], cosines, atol=1e-5)
        ranking = post(address, "/v1/rerank", query=TEXTS[0], documents=TEXTS, top_n=2)["results"]
        assert ranking[0]["document"] == {"text": TEXTS[0]}
        assert len(ranking) == 2
        for wrong in ({"input": []}, {"input": "a", "dimensions": 4096}, {"input": [[1 << 20]]}):
            with pytest.raises(BadRequestError):
                client.embeddings.create(model="toy", **wrong)
        with pytest.raises(NotFoundError):
            client.embeddings.create(model="boat", input="a")
        with pytest.raises(NotFoundError):  # this model generates nothing
            client.completions.create(model="toy", prompt="a")


@pytest.mark.sampled
@SERVER
def test_served_classes_and_rewards(models):
    hf = AutoTokenizer.from_pretrained(models / "classes")
    with served(models / "classes") as address:
        data = post(address, "/classify", model="toy", input=TEXTS)["data"]
        for item, logits in zip(
            data, scores_of(models / "classes", map(hf.encode, TEXTS)), strict=True
        ):
            np.testing.assert_allclose(item["logits"], logits, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(item["probs"], logits.softmax(0), rtol=1e-4, atol=1e-5)
            assert item["label"] == LABELS[int(logits.argmax())]
        assert "input" in post(address, "/classify", inputs=TEXTS)["message"]
    with served(models / "reward") as address:
        answer = post(address, "/v1/score", text_1=TEXTS[0][:9], text_2=TEXTS[1:])
        scores = answer["data"]
        pairs = [hf.encode(TEXTS[0][:9], text) for text in TEXTS[1:]]
        expected = [logits.sigmoid().item() for logits in scores_of(models / "reward", pairs)]
        np.testing.assert_allclose([item["score"] for item in scores], expected, atol=1e-5)
