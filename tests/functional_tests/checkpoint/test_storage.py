# SPDX-License-Identifier: Apache-2.0
"""Runs in a bucket of a real server: the numbers of runs on a disk, whatever fails on the way."""

import itertools
import json
import shutil
from pathlib import Path

import fsspec
import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.utils import storage
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from tests import buckets
from tests.functional_tests.checkpoint.jobs import SAVES, Kill, run_job
from tests.functional_tests.checkpoint.runs import STEPS, run_to
from tests.functional_tests.checkpoint.test_bad_input import refused, refused_on_a_full_disk, spoken

pytestmark = pytest.mark.skipif(buckets.MISSING, reason=buckets.REASON)
EVERY_TWO = {"checkpoint": {"save_interval": 2}}
IN_BACKGROUND = {"checkpoint": {"save_interval": 2, "async_save": True}}
RUN = f"s3://{buckets.NAME}/run"


@pytest.fixture(scope="module")
def started():
    with buckets.serving() as server:
        yield server


@pytest.fixture
def server(started, tmp_path):
    """The server without faults, and an empty bucket; this process is a machine of its own."""
    started.fault = lambda method, path: None
    with buckets.variables(started.environment(tmp_path / "here")):
        files = fsspec.filesystem("s3", use_listings_cache=False)
        if files.exists(buckets.NAME):
            files.rm(buckets.NAME, recursive=True)
        files.mkdir(buckets.NAME)
        started.files = files
        started.requests.clear()
        yield started
    started.fault = lambda method, path: None


def _names(server):
    return sorted(name.removeprefix(f"{buckets.NAME}/") for name in server.files.find(buckets.NAME))


@pytest.fixture(scope="module")
def undisturbed(two_workers, tmp_path_factory):
    return two_workers.run(run_to, tmp_path_factory.mktemp("plain") / "run", STEPS, EVERY_TWO)


@pytest.mark.parametrize("arguments", [EVERY_TWO, IN_BACKGROUND], ids=["sync", "async"])
def test_a_run_goes_on_with_the_same_bits_on_another_machine(
    two_workers, server, tmp_path, undisturbed, arguments
):
    first, second = (server.environment(tmp_path / name) for name in ("first", "second"))
    two_workers.run(buckets.inside, first, run_to, RUN, 4, arguments)
    assert paths.published_iterations(RUN) == [2, 4]
    assert paths.latest_iteration(RUN) == 4
    shutil.rmtree(tmp_path / "first")
    assert two_workers.run(buckets.inside, second, run_to, RUN, STEPS, arguments) == undisturbed
    assert {name.split("/")[1] for name in _names(server)} == {
        *(
            "iter_0000002",
            "iter_0000004",
            "iter_0000006",
            paths.TRACKER,
            "metrics.jsonl",
            "run_config.yaml",
        ),
        *("starts", "data_preview.html", "data_preview.json"),
    }
    steps = [json.loads(line)["step"] for line in _text(server, "run/metrics.jsonl").splitlines()]
    assert {4, 6} <= set(steps), "of both machines"
    assert f"save: {RUN}" in _text(server, "run/iter_0000006/run_config.yaml")
    assert not list((tmp_path / "second").rglob("*.incomplete"))


def _text(server, name):
    return server.files.cat_file(f"{buckets.NAME}/{name}").decode()


def _every(count, *faults):
    """One of ``faults``, in turns, for every ``count``-th request."""
    numbers, turns = itertools.count(1), itertools.cycle(faults)
    return lambda method, path: next(turns) if next(numbers) % count == 0 else None


FAULTS = {"fails and drops": (buckets.fails, buckets.drops), "stalls": (buckets.stalls,)}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fails and drops", EVERY_TWO),
        pytest.param("stalls", EVERY_TWO, marks=pytest.mark.slow),
        *(pytest.param(name, IN_BACKGROUND, marks=pytest.mark.slow) for name in FAULTS),
    ],
)
def test_a_bad_network_changes_nothing(two_workers, server, tmp_path, undisturbed, name, arguments):
    server.fault = _every(7, *FAULTS[name])
    first, second = (server.environment(tmp_path / name) for name in ("first", "second"))
    two_workers.run(buckets.inside, first, run_to, RUN, 4, arguments)
    assert two_workers.run(buckets.inside, second, run_to, RUN, STEPS, arguments) == undisturbed
    server.fault = lambda method, path: None
    for number in paths.published_iterations(RUN):
        assert _verified(f"{RUN}/iter_{number:07d}") == 0


def _verified(url):
    from megatron.bridge.cli.main import main

    return main(["checkpoint", "verify", url])


# Of the second save, but for the last two: passes of a point count from the start of the run.
ONE = [Kill("upload", 8), Kill("publish in the bucket", 2), Kill("move the tracker", 2)]
TWO = [Kill("upload", 2, rank=1), Kill("publish in the bucket", 2)]


def _killed_then_resumed(server, tmp_path, world, kill):
    jobs = [
        {**SAVES, "environment": server.environment(tmp_path / name)}
        for name in ("first", "second")
    ]
    assert run_job(world, RUN, jobs[0], tmp_path / "results", kill) is None, "the job survived"
    for number in paths.published_iterations(RUN):
        assert _verified(f"{RUN}/iter_{number:07d}") == 0, "nothing is half there"
    resumed = run_job(world, RUN, jobs[1], tmp_path / "results")
    assert paths.published_iterations(RUN) == [STEPS - 2, STEPS]
    assert {name.split("/")[1] for name in _names(server) if "/iter_" in name} == {
        "iter_0000004",
        "iter_0000006",
    }
    return resumed


@pytest.mark.parametrize(
    ("world", "kill"),
    [
        pytest.param(
            world, kill, id=f"{world} {kill.point}", marks=[pytest.mark.slow] * (kill is not ONE[0])
        )
        for world, kills in ((1, ONE), (2, TWO))
        for kill in kills
    ],
)
def test_a_job_that_is_killed_while_it_uploads(server, tmp_path, undisturbed_jobs, world, kill):
    assert _killed_then_resumed(server, tmp_path, world, kill) == undisturbed_jobs(world)


@pytest.mark.slow
@pytest.mark.parametrize("count", range(1, 40, 3))
@pytest.mark.parametrize("point", ["upload", "delete in the bucket"])
def test_a_job_that_is_killed_anywhere(server, tmp_path, undisturbed_jobs, point, count):
    jobs = [
        {**SAVES, "environment": server.environment(tmp_path / name)}
        for name in ("first", "second")
    ]
    run_job(1, RUN, jobs[0], tmp_path / "results", Kill(point, count))  # it may end before
    for number in paths.published_iterations(RUN):
        assert _verified(f"{RUN}/iter_{number:07d}") == 0
    assert run_job(1, RUN, jobs[1], tmp_path / "results") == undisturbed_jobs(1)


def test_a_damaged_shard_in_the_bucket_is_named(two_workers, server, tmp_path, undisturbed):
    first, second = (server.environment(tmp_path / name) for name in ("first", "second"))
    two_workers.run(buckets.inside, first, run_to, RUN, 4, EVERY_TWO)
    shard = next(name for name in _names(server) if name.startswith("run/iter_0000004/__1_"))
    content = bytearray(server.files.cat_file(f"{buckets.NAME}/{shard}"))
    content[len(content) // 2] ^= 1
    server.files.pipe_file(f"{buckets.NAME}/{shard}", bytes(content))
    resumed = two_workers.run(buckets.inside, second, spoken, RUN)
    said = resumed[0][1]
    assert (
        f"{RUN}/iter_0000004 is damaged: the content of {Path(shard).name} is not what was written"
        in said
    )
    assert f"resuming from {RUN}/iter_0000002" in said
    assert [result for result, _ in resumed] == undisturbed
    assert _verified(f"{RUN}/iter_0000004") == 0, "replaced on the way"


def test_a_damaged_copy_on_the_machine_is_downloaded_again(
    two_workers, server, tmp_path, undisturbed
):
    first = server.environment(tmp_path / "first")
    two_workers.run(buckets.inside, first, run_to, RUN, 4, EVERY_TWO)
    for shard in (tmp_path / "first").rglob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert two_workers.run(buckets.inside, first, run_to, RUN, STEPS, EVERY_TWO) == undisturbed


def _gone(server, environ, start):
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
    start(
        "404 Not Found", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")]
    )
    return [body]


def test_a_bucket_that_vanishes_ends_the_run_in_one_sentence(
    two_workers, server, tmp_path, undisturbed
):
    def lost(method, path):
        writes = method in ("PUT", "POST") and "/run/iter_0000004/" in path
        return _gone if writes else None

    server.fault = lost
    first, second = (server.environment(tmp_path / name) for name in ("first", "second"))
    messages = two_workers.run(buckets.inside, first, refused, RUN, EVERY_TWO)
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert f"{RUN}/iter_0000004" in messages[0]
    assert "bucket does not exist" in messages[0]
    server.fault = lambda method, path: None
    assert paths.published_iterations(RUN) == [2]
    assert paths.latest_iteration(RUN) == 2
    assert not list((tmp_path / "first").rglob("*.incomplete")), (
        "nor is anything left on the machine"
    )
    assert two_workers.run(buckets.inside, second, run_to, RUN, STEPS, EVERY_TWO) == undisturbed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, ("credentials", "environment")),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, ("127.0.0.1:9", "endpoint")),
    ],
    ids=["no credentials", "no server"],
)
def test_what_cannot_be_written_is_found_before_training(
    two_workers, server, tmp_path, change, words
):
    environment = (
        server.environment(tmp_path / "first")
        | change
        | {"AWS_MAX_ATTEMPTS": "1", "HOME": str(tmp_path)}
    )
    messages = two_workers.run(buckets.inside, environment, refused, RUN, EVERY_TWO)
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert all(word in messages[0] for word in (RUN, *words)), messages[0]
    assert _names(server) == []


def test_a_bucket_that_is_not_there(two_workers, server, tmp_path):
    messages = two_workers.run(
        buckets.inside,
        server.environment(tmp_path / "first"),
        refused,
        "s3://nowhere/run",
        EVERY_TWO,
    )
    assert "s3://nowhere/run" in messages[0]
    assert "bucket does not exist" in messages[0]


def test_a_full_disk_of_the_machine_keeps_the_checkpoint_before(
    two_workers, server, tmp_path, undisturbed
):
    first = server.environment(tmp_path / "first")
    messages = two_workers.run(buckets.inside, first, refused_on_a_full_disk, RUN, "*.distcp")
    assert (
        f"{RUN}/iter_0000004 cannot be written: No space left on device; free some space"
        in messages[0]
    )
    assert paths.published_iterations(RUN) == [2]
    assert two_workers.run(buckets.inside, first, run_to, RUN, STEPS, EVERY_TWO) == undisturbed


def test_weights_start_another_run(two_workers, server, tmp_path):
    first, second = (server.environment(tmp_path / name) for name in ("first", "second"))
    two_workers.run(buckets.inside, first, run_to, RUN, 4, EVERY_TWO)
    two_workers.run(run_to, tmp_path / "run", 4, EVERY_TWO)
    expected = two_workers.run(run_to, None, 2, {}, str(tmp_path / "run"))
    assert two_workers.run(buckets.inside, second, run_to, None, 2, {}, RUN) == expected
    expected = two_workers.run(run_to, None, STEPS, {}, None, str(tmp_path / "run"))
    assert two_workers.run(buckets.inside, second, run_to, None, STEPS, {}, None, RUN) == expected
    server.requests.clear()
    with console().capture(), pytest.raises(UserError, match=r"s3://models/typo does not exist"):
        paths.resolve(f"s3://{buckets.NAME}/typo")
    assert not [method for method, _ in server.requests if method == "PUT"]


def test_another_layout_downloads_what_it_needs(two_workers, server, tmp_path):
    first, second = (server.environment(tmp_path / name) for name in ("first", "second"))
    sharded = {"model": {"tensor_model_parallel_size": 2}}
    two_workers.run(buckets.inside, first, run_to, RUN, 4, {**EVERY_TWO, **sharded})
    two_workers.run(run_to, tmp_path / "run", 4, {**EVERY_TWO, **sharded})
    expected = two_workers.run(run_to, tmp_path / "run", STEPS, EVERY_TWO)
    assert two_workers.run(buckets.inside, second, run_to, RUN, STEPS, EVERY_TWO) == expected


def test_uploads_and_downloads_are_in_parallel_parts(server, tmp_path):
    folder = storage.local(f"s3://{buckets.NAME}/large")
    folder.mkdir(parents=True)
    content = bytes(range(256)) * (110 << 12)  # 110 MiB are three parts, and four ranges
    (folder / "file").write_bytes(content)
    server.fault = _every(4, buckets.drops)
    storage.push(folder, ["file"])
    parts = [path for method, path in server.requests if method == "PUT"]
    assert len(parts) >= 2
    (folder / "file").unlink()
    storage.pull(folder, {"file"})
    assert (folder / "file").read_bytes() == content
