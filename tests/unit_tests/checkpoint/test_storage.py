# SPDX-License-Identifier: Apache-2.0
"""Folders in a bucket, here one in the memory of this process: what is downloaded, uploaded, hidden and refused."""

import dataclasses
import json
import threading
from pathlib import Path

import fsspec
import pytest

from megatron.bridge.checkpoint import bucket, lock, paths
from megatron.bridge.models.hf_pretrained import hub, model_folder
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.utils import storage
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import Process
from megatron.bridge.utils.storage_paths import CACHE, shown, split, url_of
from tests.toy_run import toy_config


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """An empty bucket, and an empty machine."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return memory


RUN = "memory://bucket/run"


def _put(files, names, text="text"):
    for name in names:
        files.pipe_file(f"/bucket/run/{name}", text.encode())


def _names(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3:/bucket/run", Path("s3://bucket/run/")])
def test_urls_survive_pathlib(url):
    assert split(url) == ("s3", "bucket/run")


@pytest.mark.parametrize(
    "path", ["runs/llama", "/runs/llama", "~/x", "C:/runs", "a:b", "org/model"]
)
def test_paths_stay_paths(path):
    assert storage.local(path) == Path(path)
    assert url_of(path) is None


def test_a_url_stands_for_a_folder_and_is_shown():
    folder = storage.local(RUN)
    assert url_of(folder) == RUN
    assert url_of(folder / "iter_0000001") == f"{RUN}/iter_0000001"
    assert storage.local(folder) == folder
    assert (
        shown(f"resumed from {folder}/iter_0000001 at step 1")
        == f"resumed from {RUN}/iter_0000001 at step 1"
    )
    assert str(UserError(f"{folder} is full")) == f"{RUN} is full"
    with console().capture() as captured:
        console().print(f"checkpoint: {folder}", markup=False)
    assert captured.get() == f"checkpoint: {RUN}\n"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://bucket/run", ("foo://", "s3://")),
        ("memry://bucket/run", ("memry://", "memory")),
        ("file:///tmp/run", ("file://", "a path")),
        ("memory://", ("memory://", "BUCKET")),
        ("memory://bucket/../../etc", ("BUCKET", "..")),
    ],
)
def test_what_is_no_folder_of_a_bucket_is_refused(url, words):
    with pytest.raises(UserError) as caught:
        storage.local(url)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def missing(*arguments, **options):
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(UserError, match=r"gs://.*\[storage\].*gcsfs"):
        storage.local("gs://bucket/run")


def test_files_are_downloaded_once_and_again_when_they_change(files):
    folder = storage.local(RUN)
    _put(files, ["a.txt", "b.bin", "sub/c.txt"])
    storage.pull(folder, lambda name: name.endswith(".txt"))
    assert _names(folder) == ["a.txt"]
    storage.pull(folder, {"a.txt", "sub/c.txt", "none.txt"}, deep=True)
    assert _names(folder) == ["a.txt", "sub/c.txt"]
    (folder / "a.txt").write_text("mine")
    storage.pull(folder, {"a.txt"})
    assert (folder / "a.txt").read_text() == "mine", "the bucket has not changed"
    _put(files, ["a.txt"], "TEXT")
    storage.pull(folder, {"a.txt"})
    assert (folder / "a.txt").read_text() == "TEXT"
    files.rm_file("/bucket/run/a.txt")
    storage.pull(folder, lambda name: True, deep=True, exact=True)
    assert _names(folder) == ["b.bin", "sub/c.txt"]


def test_names_that_lead_out_of_the_folder_are_not_downloaded(files, tmp_path):
    for name in ("a.txt", "../b.txt", "x/../../c.txt", f"/{tmp_path}/d.txt"):
        files.store[f"/bucket/run/{name}"] = files.open("/bucket/run/a.txt", "wb")
        files.pipe_file("/bucket/run/a.txt", b"text")
    storage.pull(storage.local(RUN), lambda name: True, deep=True)
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["a.txt"]


def test_a_short_download_is_not_taken_for_the_file(files, monkeypatch):
    _put(files, ["a.txt"])
    monkeypatch.setattr(type(files), "cat_file", lambda self, *arguments, **options: b"te")
    folder = storage.local(RUN)
    with pytest.raises(
        storage.StorageError, match=r"memory://bucket/run/a.txt returned 2 of 4 bytes"
    ):
        storage.pull(folder, {"a.txt"})
    assert not (folder / "a.txt").exists()


def test_a_full_disk_and_a_lost_bucket_are_one_sentence(files, monkeypatch):
    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device", "a.txt")

    _put(files, ["a.txt"])
    monkeypatch.setattr(type(files), "cat_file", full)
    with pytest.raises(
        UserError, match=f"{RUN} cannot be .*No space left on device.*a.txt.*; .*{CACHE}"
    ):
        storage.pull(storage.local(RUN), {"a.txt"})

    def lost(self, path, value, **options):
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(type(files), "pipe_file", lost)
    with pytest.raises(
        storage.StorageError, match=f"{RUN}/x cannot be .*does not exist; .*credentials"
    ):
        storage.write(storage.local(RUN) / "x", "text")


SAVED = [
    "__0_1_0.distcp",
    ".metadata",
    "metadata.json",
    "manifest.json",
    "tokenizer/tokenizer.json",
]


def _published(files, *iterations):
    for number in iterations:
        _put(files, [f"iter_{number:07d}/{name}" for name in SAVED])
    _put(files, [paths.TRACKER], f"{iterations[-1]}\n")


def test_readers_see_what_was_published(files):
    _published(files, 10, 20)
    _put(files, ["iter_0000020.incomplete", "run.lock/x.json"])
    assert paths.published_iterations(RUN) == [10]
    with pytest.raises(
        UserError, match=f"names iteration 20, but {RUN}/iter_0000020 is missing.*iter_0000010"
    ):
        paths.resolve(RUN)
    with pytest.raises(UserError, match=f"{RUN}/iter_0000020 does not exist"):
        paths.resolve(f"{RUN}/iter_0000020")
    directory = paths.resolve(f"{RUN}/iter_0000010")
    assert _names(directory) == sorted(SAVED[1:]), "shards are left where they are"
    files.rm_file("/bucket/run/iter_0000020.incomplete")
    assert url_of(paths.resolve(RUN)) == f"{RUN}/iter_0000020"
    bucket.remove(storage.local(RUN) / "iter_0000010")
    assert paths.published_iterations(RUN) == [20]
    assert not directory.exists(), "nor what was downloaded"


def test_leftovers_are_removed_and_foreign_checkpoints_are_not(files):
    _published(files, 10, 20)
    files.rm_file("/bucket/run/iter_0000010/manifest.json")  # such as one of Megatron-LM
    _put(
        files, ["iter_0000020.incomplete", "iter_0000030.incomplete", "iter_0000030/__0_2_0.distcp"]
    )
    paths.recover(RUN)
    left = {name.split("/")[3] for name in files.find("/bucket")}
    assert left == {"iter_0000010", paths.TRACKER}


def test_a_checkpoint_is_published_if_all_of_it_arrived(files):
    staging = storage.local(RUN) / "iter_0000010.1f3a9c07.incomplete"
    staging.mkdir(parents=True)
    directory = bucket.final_of(staging)
    assert (directory.name, bucket.token_of(staging)) == ("iter_0000010", "1f3a9c07")
    _published(files, 10)
    bucket.begin(directory)
    assert paths.published_iterations(RUN) == []
    assert not files.find("/bucket/run/iter_0000010"), "those of an earlier save are gone"
    (staging / "a").write_text("text")
    storage.push(staging, ["a"], directory)
    with pytest.raises(storage.StorageError, match=r"iter_0000010 was not uploaded: b is missing"):
        bucket.publish(directory, {"a": 4, "b": 4})
    assert paths.published_iterations(RUN) == []
    bucket.publish(directory, {"a": 4})
    bucket.keep(staging)
    assert paths.published_iterations(RUN) == [10]
    assert _names(directory) == ["a"]


def test_the_other_files_of_a_run_are_uploaded_when_they_change(files):
    root = storage.local(RUN)
    root.mkdir(parents=True)
    for name in (
        "metrics.jsonl",
        "starts/001/run_config.yaml",
        "iter_0000010/a",
        "run.lock/b",
        ".hidden",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    bucket.push_beside(root)
    assert sorted(files.find("/bucket")) == [
        "/bucket/run/metrics.jsonl",
        "/bucket/run/starts/001/run_config.yaml",
    ]
    (root / "metrics.jsonl").write_text("12")
    bucket.refresh(root)
    assert (root / "metrics.jsonl").read_text() == "12", "what is newer here is not overwritten"
    bucket.push_beside(root)
    assert files.cat_file("/bucket/run/metrics.jsonl") == b"12"


def test_one_of_many_gets_the_lock(files):
    folder = storage.local(RUN) / lock.NAME
    won, left, start = [], list(range(8)), threading.Barrier(8)

    def claim(number):
        start.wait()
        while not won:
            if bucket.claim(folder / f"{number}.json", "{}") is not None:
                won.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in left]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert list(storage.listing(folder)) == [f"{won[0]}.json"]


def _held_elsewhere(files):
    elsewhere = dataclasses.replace(Process.current(), host="elsewhere", pid=7)
    _put(files, ["run.lock/x.json"], json.dumps(dataclasses.asdict(elsewhere)))


def test_a_dead_run_elsewhere_is_replaced(files, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    _held_elsewhere(files)
    assert str(lock.holder(RUN)) == "process 7 on elsewhere"
    assert lock.acquire(RUN)
    assert not lock.acquire(RUN)
    assert lock.holder(RUN) == Process.current()
    lock.check(RUN)
    files.rm("/bucket/run/run.lock", recursive=True)
    with pytest.raises(UserError, match="being written by"):
        lock.check(RUN)
    lock.release(RUN)
    assert not files.find("/bucket")


def test_a_living_run_elsewhere_keeps_its_lock(files, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    _held_elsewhere(files)
    tags = iter(["1", "2"])
    monkeypatch.setattr(lock, "_last_touch", lambda record: next(tags))
    with pytest.raises(
        UserError, match=f"{RUN} is being written by process 7 on elsewhere.*checkpoint.save"
    ):
        lock.acquire(RUN)
    assert list(files.find("/bucket")) == ["/bucket/run/run.lock/x.json"]


def test_a_holder_shows_that_it_lives(files, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    lock.acquire(RUN)
    folder = storage.local(RUN) / lock.NAME
    first = next(iter(storage.listing(folder).values())).tag
    while next(iter(storage.listing(folder).values())).tag == first:
        pass
    lock.release(RUN)
    assert not files.find("/bucket")


def _exported(folder, **texts):
    staging = model_folder.create_staging(folder)
    for name, text in texts.items():
        (staging / name).write_text(text)
    return staging


EXPORT = {
    "model-1.safetensors": "one",
    "model-2.safetensors": "two",
    "model.safetensors.index.json": "{}",
    "config.json": "{}",
}


def test_an_export_that_was_interrupted_goes_on(files, monkeypatch):
    folder = storage.local("memory://bucket/exported")
    put, sent, failed = type(files).put_file, [], []

    def fragile(self, local, remote, **options):
        sent.append(Path(remote).name)
        if sent[-1] == "model.safetensors.index.json" and not failed:
            failed.append(sent[-1])
            raise ConnectionError("lost")
        put(self, local, remote, **options)

    monkeypatch.setattr(type(files), "put_file", fragile)
    staging = _exported(folder, **EXPORT)
    with pytest.raises(storage.StorageError, match="lost"):
        model_folder.publish(staging, folder)
    assert not files.exists("/bucket/exported/config.json"), "so no reader takes it for a model"
    with pytest.raises(UserError, match=r"no config\.json"):
        hub.resolve("memory://bucket/exported", weights=True)
    sent.clear()
    model_folder.publish(_exported(folder, **EXPORT | {"model-2.safetensors": "new"}), folder)
    assert sent == ["model-2.safetensors", "model.safetensors.index.json", "config.json"]
    assert {name: files.cat_file(name) for name in files.find("/bucket")} == {
        f"/bucket/exported/{name}": text.encode()
        for name, text in (EXPORT | {"model-2.safetensors": "new"}).items()
    }


def test_a_folder_of_somebody_else_is_not_written_to(files):
    files.pipe_file("/bucket/exported/notes.txt", b"mine")
    with pytest.raises(UserError, match="memory://bucket/exported exists and is not empty"):
        model_folder.create_staging(storage.local("memory://bucket/exported"))
    model_folder.create_staging(storage.local("memory://bucket/other"))


def _refused(**options):
    with pytest.raises(UserError) as caught:
        toy_config(**options).resolve()
    return str(caught.value)


def test_a_run_works_on_the_local_folder_and_writes_the_url():
    config = toy_config(checkpoint=CheckpointConfig(save=RUN)).resolve().config
    assert url_of(config.checkpoint.save) == url_of(config.logger.log_dir) == RUN
    assert f"save: {RUN}\n" in config.to_yaml()
    assert config.resolve().config.checkpoint.save == config.checkpoint.save


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ({"save": "foo://bucket/run"}, ("checkpoint.save=foo://bucket/run", "s3://")),
        ({"save": "run", "load": "file:///run"}, ("checkpoint.load=file:///run", "a path")),
        (
            {"save": RUN, "also_save_hf_checkpoint": True},
            ("checkpoint.also_save_hf_checkpoint=True", RUN, "a disk"),
        ),
        (
            {"save": RUN, "async_save": True, "async_strategy": "nvrx"},
            ("async_strategy=nvrx", RUN, "a disk"),
        ),
        (
            {"save": RUN, "non_persistent_ckpt_type": "global", "non_persistent_save_interval": 1},
            ("non_persistent_ckpt_type=global", RUN, "a disk"),
        ),
        (
            {
                "save": "run",
                "non_persistent_ckpt_type": "local",
                "non_persistent_save_interval": 1,
                "non_persistent_local_ckpt_dir": RUN,
            },
            (f"checkpoint.non_persistent_local_ckpt_dir={RUN}", "a local path", "checkpoint.save"),
        ),
    ],
)
def test_settings_that_cannot_be_urls_are_refused_by_name(checkpoint, words):
    message = _refused(checkpoint=CheckpointConfig(**checkpoint))
    assert all(word in message for word in words), message
