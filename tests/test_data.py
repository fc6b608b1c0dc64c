"""Data sets: what arrives in the cache, what is refused, and how official files are found, downloaded and checked."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import multiprocessing
import os
import socket
import struct
import sys
import tarfile
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import ndimage

from conftest import needs
from crosstrain.data import DataSet, Request, cache, check, download, fit, idx, prepare
from crosstrain.data import cifar10 as cifar10_module
from crosstrain.data import fashion_mnist as fashion_module
from crosstrain.data import mnist as mnist_module
from crosstrain.data.download import File, Source, obtain
from crosstrain.errors import ConfigError, OutcomeError

CONF = Path(__file__).parents[1] / "conf" / "data"
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CROSSTRAIN_DATA_MIRROR", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def spec(kind="image", shape=(1, 28, 28), classes=10, target="class", output=None, loss=None, name="net", ops=()):
    loss = loss or "softmax_cross_entropy"
    output = list(output or [classes])
    target_json = {"kind": target, "classes": classes} if target == "class" else {"kind": target}
    return {
        "name": name,
        "input": {"kind": kind, "shape": list(shape)},
        "target": target_json,
        "ops": [*ops, {"op": "linear", "name": "last", "inputs": ["input"], "shape": output}],
        "output": "last",
        "loss": {"op": loss},
    }


def config(name, **changes):
    return {**yaml.safe_load((CONF / f"{name}.yaml").read_text()), **changes}


def make(name, network=None, batch=8, seed=0, data_dir=None, report=lambda line: None, **changes) -> DataSet:
    return prepare(config(name, **changes), network or spec(), seed, data_dir, report, batch)


def arrays(split):
    return np.load(split.inputs), None if split.targets is None else np.load(split.targets)


# -- the configuration ---------------------------------------------------------------------------------------------------------


def test_every_data_config_has_the_same_keys_and_its_own_name():
    files = sorted(CONF.glob("*.yaml"))
    names = {"auto", "synthetic", "digits", "mnist", "fashion_mnist", "cifar10", "ptb", "imdb", "text"}
    assert {file.stem for file in files} == names
    for file in files:
        group = yaml.safe_load(file.read_text())
        assert list(group) == ["name", "_target_", "placement", "fit", "samples"]
        assert group["name"] == file.stem
        if file.stem != "auto":
            assert callable(check(group))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": "gpu"}, "data.placement=gpu: allowed are null, device, host"),
        ({"fit": "crop"}, "data.fit=crop: allowed are none, pad, scale"),
        ({"samples": 0}, "data.samples=0"),
        ({"samples": True}, "data.samples=True"),
        ({"_target_": None}, "names no function"),
        ({"_target_": "crosstrain.data.nothing.here"}, "data._target_=crosstrain.data.nothing.here: can not be imported"),
    ],
)
def test_bad_values_of_the_group_are_one_line(changes, words):
    with pytest.raises(ConfigError) as caught:
        make("digits", **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_data_set_of_the_user_is_one_function(tmp_path):
    (tmp_path / "flowers.py").write_text(
        textwrap.dedent("""
        import numpy as np
        from crosstrain.data import Recipe
        def flowers(request):
            def load():
                images = np.arange(20 * 12, dtype=np.uint8).reshape(20, 3, 2, 2)
                return {"train_inputs": images, "train_targets": np.arange(20) % request.config["kinds"]}
            return Recipe("image", (3, 2, 2), request.config["kinds"], "1", [2.0, 3.0, 4.0], [0.0, 0.0, 1.0], load)
        def wrong(request):
            return {"train": 1}
        """)
    )
    sys.path.insert(0, str(tmp_path))
    group = {"name": "flowers", "_target_": "flowers.flowers", "placement": None, "fit": "none", "samples": 6, "kinds": 3}
    data = prepare(group, spec(shape=(3, 2, 2)), 0, None, lambda line: None, 2)
    inputs, targets = arrays(data.train)
    assert inputs.shape == (6, 3, 2, 2) and inputs[5, 0, 0, 0] == 60
    assert targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.test, data.placement, data.classes, data.scale, data.offset) == (None, "host", 3, [2, 3, 4], [0, 0, 1])
    assert data.as_json()["test"] is None
    with pytest.raises(ConfigError, match=r"must give a crosstrain.data.Recipe, gave dict"):
        prepare({**group, "_target_": "flowers.wrong"}, spec(shape=(3, 2, 2)), 0, None, lambda line: None, 2)


# -- digits and the cache ------------------------------------------------------------------------------------------------------


def test_digits():
    from sklearn.datasets import load_digits

    data = make("digits")
    inputs, targets = arrays(data.train)
    test_inputs, test_targets = arrays(data.test)
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((1437, 1, 28, 28), np.uint8, np.int64)
    assert (data.train.count, data.test.count, test_inputs.shape) == (1437, 360, (360, 1, 28, 28))
    assert (data.kind, data.shape, data.classes, data.placement) == ("image", (1, 28, 28), 10, "host")
    assert data.scale == [1 / 255] and data.offset == [0]
    assert inputs.min() == 0 and inputs.max() > 245
    bunch = load_digits()
    order = np.random.RandomState(0).permutation(1797)
    assert np.array_equal(np.concatenate([targets, test_targets]), bunch.target[order])
    wanted = ndimage.zoom(bunch.images[order[0]], 3.5, order=1, mode="nearest", grid_mode=True) * 255 / 16
    assert np.abs(inputs[0, 0] - wanted).max() <= 0.51


def test_the_cache_is_used_and_keys_tell_contents_apart(tmp_path):
    lines: list[str] = []
    first = make("digits", report=lines.append)
    again = make("digits", report=lines.append)
    fewer = make("digits", samples=100, report=lines.append)
    padded = make("digits", spec(shape=(1, 32, 32)), fit="pad", report=lines.append)
    scaled = make("digits", spec(shape=(1, 32, 32)), fit="scale", report=lines.append)
    assert again == first
    assert len(lines) == 4 and lines[0].startswith("writing digits-")
    assert len({d.key for d in (first, fewer, padded, scaled)}) == 4
    assert (fewer.train.count, fewer.test.count) == (100, 360)
    assert np.array_equal(np.load(fewer.train.inputs), np.load(first.train.inputs)[:100])
    files = {path.name for path in first.train.inputs.parent.iterdir()}
    assert files == {"train_inputs.npy", "train_targets.npy", "test_inputs.npy", "test_targets.npy"}
    assert not list((tmp_path / "cache" / "data").glob(".*"))


def test_a_damaged_or_half_written_cache_is_made_again():
    data = make("digits")
    wanted = np.load(data.train.inputs)
    with data.train.inputs.open("r+b") as file:
        file.truncate(1000)
    leftover = data.train.inputs.parent.with_name(f".digits-{data.key}.999999")
    leftover.mkdir()
    assert np.array_equal(np.load(make("digits").train.inputs), wanted)
    assert not leftover.exists()


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def parts():
        yield np.zeros((2, 3), np.float32)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cache.stored("x-1", lambda: {"train_inputs": cache.Stream((4, 3), np.float32, parts())}, lambda line: None)
    with pytest.raises(ValueError, match="got 2 samples, 4 were announced"):
        short = cache.Stream((4, 3), np.float32, [np.zeros((2, 3), np.float32)])
        cache.stored("x-1", lambda: {"train_inputs": short}, lambda line: None)
    assert [path.name for path in (tmp_path / "cache" / "data").iterdir()] == ["x-1.lock"]


def _make_digits(cache_path, lines):
    os.environ["CROSSTRAIN_CACHE"] = cache_path
    make("digits", report=lines.put)


def test_two_drivers_at_once_write_once(tmp_path):
    context = multiprocessing.get_context("fork")
    lines = context.Queue()
    workers = [context.Process(target=_make_digits, args=(str(tmp_path / "shared"), lines)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    told = []
    while not lines.empty():
        told.append(lines.get())
    assert len([line for line in told if line.startswith("writing")]) == 1


def test_full_disk_is_said_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: type("U", (), {"free": 1_000_000}))
    with pytest.raises(OutcomeError) as caught:
        make("digits")
    assert caught.value.outcome == "data_missing" and "which has 1 MB free" in caught.value.message
    assert "CROSSTRAIN_CACHE" in caught.value.hint
    assert not list((tmp_path / "cache" / "data").glob("*.npy"))


# -- does it fit the network ---------------------------------------------------------------------------------------------------


def unsupported(*args, **kwargs) -> OutcomeError:
    with pytest.raises(OutcomeError) as caught:
        make(*args, **kwargs)
    assert caught.value.outcome == "unsupported"
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_shapes_that_do_not_fit_name_both_and_the_way_out():
    error = unsupported("cifar10", spec(name="lenet"))
    assert error.message == "lenet takes 1×28×28 images; cifar10 gives 3×32×32 images"
    assert "data.fit" not in error.hint  # three channels can not become one
    error = unsupported("digits", spec(shape=(3, 32, 32), name="resnet56"))
    assert error.message == "resnet56 takes 3×32×32 images; digits gives 1×28×28 images"
    assert error.hint == "data.fit=pad or data.fit=scale adapts it"
    error = unsupported("digits", spec(shape=(1, 20, 30)), fit="pad")
    assert error.hint == "data.fit=scale adapts it"
    error = unsupported("digits", spec("tokens", (32,), output=(32, 10)))
    assert "10 classes for each of 32 tokens" in error.message
    error = unsupported("digits", spec("tokens", (32,)))
    assert "takes 32 tokens" in error.message
    error = unsupported("digits", spec("vector", (100,)), fit="scale")
    assert "takes 100 values" in error.message


def test_targets_that_do_not_fit():
    assert "learns 5 classes; digits has targets of 10 classes" in unsupported("digits", spec(classes=5)).message
    assert make("digits", spec(classes=1000)).classes == 10
    error = unsupported("digits", spec(target="values", output=[3], loss="mean_squared_error"))
    assert "learns 3 values; digits has targets of 10 classes" in error.message


def test_a_vector_network_takes_images_as_they_are_and_an_autoencoder_no_targets():
    data = make("digits", spec("vector", (784,)))
    assert data.shape == (1, 28, 28) and data.train.targets is not None
    auto = make("digits", spec("vector", (784,), target="input", output=[784], loss="mean_squared_error"))
    assert auto.train.targets is None and auto.test.targets is None and auto.key == data.key
    assert auto.as_json()["train"] == {"inputs": str(data.train.inputs), "targets": None, "samples": 1437}


def test_a_batch_larger_than_the_data_is_unsupported():
    error = unsupported("digits", batch=1438)
    assert "global batch of 1438" in error.message and "1437 training samples" in error.message
    assert "batch_size=1437 or less" in error.hint
    assert make("digits", batch=1437).train.count == 1437
    assert "data.samples" in unsupported("digits", batch=20, samples=10).hint


def test_pad_puts_the_image_in_the_middle_and_repeats_grey():
    plain = np.load(make("digits").train.inputs)
    data = make("digits", spec(shape=(3, 33, 32)), fit="pad")
    padded = np.load(data.train.inputs)
    assert padded.shape == (1437, 3, 33, 32) and padded.dtype == np.uint8
    for channel in range(3):
        assert np.array_equal(padded[:, channel, 2:30, 2:30], plain[:, 0])
    assert padded.sum() == 3 * plain.sum(dtype=np.int64)
    assert data.scale == [1 / 255] * 3 and data.offset == [0] * 3 and data.shape == (3, 33, 32)


@pytest.mark.parametrize("size", [(56, 56), (14, 20), (28, 28), (40, 9)])
def test_scale_is_bilinear_with_pixel_centres_at_half(size):
    images = np.random.RandomState(0).rand(2, 3, 28, 28).astype(np.float32)
    zoom = (1, 1, size[0] / 28, size[1] / 28)
    wanted = ndimage.zoom(images, zoom, order=1, mode="nearest", grid_mode=True)
    assert np.allclose(fit.scale(images, *size), wanted, atol=1e-5)


def test_scaled_integer_images_are_rounded_not_cut():
    images = np.full((1, 1, 3, 3), 200, np.uint8)
    assert (fit.scale(images, 7, 7) == 200).all()
    assert fit.scale(np.array([[[[0, 3]]]], np.uint8), 1, 4).ravel().tolist() == [0, 1, 2, 3]  # 0, 0.75, 2.25, 3


# -- synthetic -----------------------------------------------------------------------------------------------------------------


def test_synthetic_images_are_a_seeded_ring_of_four_batches():
    network = spec(shape=(3, 4, 4), classes=7)
    data = make("synthetic", network, batch=16)
    inputs, targets = arrays(data.train)
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((64, 3, 4, 4), np.float32, np.int64)
    assert abs(inputs.mean()) < 0.1 and abs(inputs.std() - 1) < 0.1
    assert set(targets.tolist()) == set(range(7))
    assert data.placement == "device" and data.test is None and data.scale == [1] * 3 and data.offset == [0] * 3
    assert make("synthetic", network, batch=16, placement="host").placement == "host"
    other = make("synthetic", network, batch=16, seed=1)
    assert other.key != data.key and not np.array_equal(np.load(other.train.inputs), inputs)
    renamed = make("synthetic", {**network, "name": "twin"}, batch=16)
    assert renamed.key == data.key


def test_synthetic_data_is_the_same_in_another_cache(tmp_path, monkeypatch):
    first = arrays(make("synthetic", spec("vector", (5,))).train)
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "other"))
    second = arrays(make("synthetic", spec("vector", (5,))).train)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_parts_it_is_written_in_do_not_repeat(monkeypatch):
    from crosstrain.data import synthetic

    monkeypatch.setattr(synthetic, "PART_BYTES", 3 * 5 * 8)
    inputs, _ = arrays(make("synthetic", spec("vector", (5,))).train)
    assert len(np.unique(inputs)) == inputs.size == 160


def test_synthetic_tokens():
    embedding = {"op": "embedding", "name": "e", "inputs": ["input"], "vocabulary": 11, "width": 2, "shape": [6, 2]}
    masked = {"op": "masked_mean", "name": "m", "inputs": ["e"], "shape": [2]}
    language = make("synthetic", spec("tokens", (6,), 11, output=(6, 11), ops=[embedding]), batch=32)
    inputs, targets = arrays(language.train)
    assert (inputs.dtype, targets.dtype, targets.shape) == (np.int32, np.int64, (128, 6))
    assert set(inputs.ravel().tolist()) == set(range(11)) == set(targets.ravel().tolist())
    assert language.scale == [] and language.offset == []
    with_mask, targets = arrays(make("synthetic", spec("tokens", (6,), 2, ops=[embedding, masked]), batch=32).train)
    assert set(with_mask.ravel().tolist()) == set(range(1, 11)) and targets.shape == (128,)


def test_synthetic_values_and_autoencoder():
    values = make("synthetic", spec("vector", (5,), target="values", output=[3], loss="mean_squared_error"))
    assert np.load(values.train.targets).shape == (32, 3) and np.load(values.train.targets).dtype == np.float32
    auto = make("synthetic", spec("vector", (5,), target="input", output=[5], loss="mean_squared_error"))
    assert auto.train.targets is None and auto.train.count == 32


def test_the_size_of_the_ring(monkeypatch):
    from crosstrain.data import synthetic

    monkeypatch.setattr(synthetic, "RING_BYTES", 3 * 10 * 5 * 4)  # three batches of 10 vectors of 5 float32
    assert make("synthetic", spec("vector", (5,)), batch=10).train.count == 30
    large = make("synthetic", spec("vector", (5,)), batch=100).train
    assert large.count == 200 and len(np.load(large.inputs)) == len(np.load(large.targets)) == 30  # never fewer than 2
    assert make("synthetic", spec("vector", (5,)), batch=10, samples=59).train.count == 50
    error = unsupported("synthetic", spec("vector", (5,)), batch=10, samples=19)
    assert "data.samples=19" in error.message and "data.samples=20 or more" in error.hint


def test_rings_unused_for_a_day_are_removed():
    old, recent = make("synthetic", batch=4), make("synthetic", batch=5)
    digits_folder = make("digits").train.inputs.parent
    day_ago = time.time() - 25 * 3600
    for folder in (old.train.inputs.parent, digits_folder):
        os.utime(folder, (day_ago, day_ago))
    make("synthetic", batch=6)
    assert not old.train.inputs.exists() and recent.train.inputs.exists() and digits_folder.exists()
    os.utime(recent.train.inputs.parent, (day_ago, day_ago))
    make("synthetic", batch=5)  # asked for: young again
    make("synthetic", batch=7)
    assert recent.train.inputs.exists()


# -- official files ------------------------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def small_idx() -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    random = np.random.RandomState(3)
    values = {
        "train-images-idx3-ubyte.gz": random.randint(0, 256, (50, 28, 28)).astype(np.uint8),
        "train-labels-idx1-ubyte.gz": random.randint(0, 10, 50).astype(np.uint8),
        "t10k-images-idx3-ubyte.gz": random.randint(0, 256, (9, 28, 28)).astype(np.uint8),
        "t10k-labels-idx1-ubyte.gz": random.randint(0, 10, 9).astype(np.uint8),
    }
    return {name: gzip.compress(idx_bytes(array), mtime=0) for name, array in values.items()}, values


def source_of(name: str, contents: dict[str, bytes], address="http://127.0.0.1:9/none", **more) -> Source:
    files = tuple(File(file, len(content), hashlib.sha256(content).hexdigest()) for file, content in contents.items())
    return Source(name, (address,), files, **more)


class Server:
    """Serves `files` {path: bytes}; `cut` {path: bytes to send before the connection is closed, each time}."""

    def __init__(self, files, cut=None, ranges=True):
        self.files, self.cut, self.requests = files, cut or {}, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests.append((self.path, self.headers.get("Range")))
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                start = 0
                if ranges and self.headers.get("Range"):
                    start = int(self.headers["Range"][len("bytes=") : -1])
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                with suppress(ConnectionError):  # the client may have had enough
                    self.wfile.write(content[start:][: outer.cut.get(self.path)])

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def missing(source, data_dir=None) -> OutcomeError:
    with pytest.raises(OutcomeError) as caught:
        obtain(source, data_dir, lambda line: None)
    assert caught.value.outcome == "data_missing"
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def downloads(tmp_path) -> list[str]:
    folder = tmp_path / "cache" / "data" / "downloads"
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


BIG = np.random.RandomState(0).bytes(1_000_000)


def test_downloaded_once_then_from_the_cache(tmp_path):
    lines: list[str] = []
    with Server({"/set/a.bin": BIG}) as server:
        source = source_of("toy", {"a.bin": BIG}, f"{server.address}/set")
        assert obtain(source, None, lines.append)["a.bin"].read_bytes() == BIG
        assert obtain(source, None, lines.append)["a.bin"].read_bytes() == BIG
        assert server.requests == [("/set/a.bin", None)]
    assert lines == [f"toy: downloading a.bin (1.0 MB) from {server.address}/set/a.bin"]
    assert downloads(tmp_path) == ["a.bin"]


def test_progress_is_told(monkeypatch):
    monkeypatch.setattr(download, "REPORT_S", 0.0)
    lines: list[str] = []
    with Server({"/a.bin": BIG}) as server:
        obtain(source_of("toy", {"a.bin": BIG}, server.address), None, lines.append)
    assert lines[-1] == "toy: 1.0 of 1.0 MB (100 %)" and len(lines) > 2


def test_a_wrong_download_is_named_and_not_kept(tmp_path):
    wrong = bytes(len(BIG))
    with Server({"/a.bin": wrong}) as server:
        error = missing(source_of("toy", {"a.bin": BIG}, server.address))
    assert hashlib.sha256(wrong).hexdigest() in error.message and hashlib.sha256(BIG).hexdigest() in error.message
    assert f"{server.address}/a.bin" in error.message and " is wrong" in error.message
    assert downloads(tmp_path) == []


def test_a_longer_file_is_not_downloaded_without_end(tmp_path):
    with Server({"/a.bin": BIG + bytes(50_000_000)}) as server:
        error = missing(source_of("toy", {"a.bin": BIG}, server.address))
        assert " is wrong: 1," in error.message and "bytes of 1,000,000" in error.message  # not 51 MB
        assert len(server.requests) == 1
    assert downloads(tmp_path) == []


def test_no_such_file_and_no_server():
    with Server({}) as server:
        error = missing(source_of("toy", {"a.bin": BIG}, server.address, hint="on Debian: apt-get install toy"))
    assert "HTTP 404" in error.message
    assert error.hint.startswith(f"put a.bin (from {server.address}/) into a folder DIR/toy and give data_dir=DIR")
    assert error.hint.endswith("on Debian: apt-get install toy")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "refused" in missing(source_of("toy", {"a.bin": BIG}, f"http://127.0.0.1:{port}")).message
    assert "unknown url type" in missing(source_of("toy", {"a.bin": BIG}, "no-address")).message


def test_the_next_address_is_tried():
    with Server({"/a.bin": BIG}) as server:
        files = source_of("toy", {"a.bin": BIG}).files
        source = Source("toy", ("http://127.0.0.1:9/none", server.address), files)
        assert obtain(source, None, lambda line: None)["a.bin"].read_bytes() == BIG


def test_an_interrupted_download_goes_on_where_it_ended(tmp_path):
    with Server({"/a.bin": BIG}, cut={"/a.bin": 400_000}) as server:
        assert obtain(source_of("toy", {"a.bin": BIG}, server.address), None, lambda line: None)["a.bin"].read_bytes() == BIG
        assert [ranges for _, ranges in server.requests] == [None, "bytes=400000-", "bytes=800000-"]
    assert downloads(tmp_path) == ["a.bin"]


def test_a_download_cut_too_often_is_continued_by_the_next_run(tmp_path):
    with Server({"/a.bin": BIG}, cut={"/a.bin": 300_000}) as server:
        source = source_of("toy", {"a.bin": BIG}, server.address)
        error = missing(source)
        assert "after 900,000 of 1,000,000 bytes" in error.message
        assert downloads(tmp_path) == ["a.bin.part"]
        assert obtain(source, None, lambda line: None)["a.bin"].read_bytes() == BIG


def test_a_server_without_ranges_sends_it_all_again(tmp_path):
    with Server({"/a.bin": BIG}, ranges=False) as server:
        part = tmp_path / "cache" / "data" / "downloads" / "toy" / "a.bin.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * 1000)
        assert obtain(source_of("toy", {"a.bin": BIG}, server.address), None, lambda line: None)["a.bin"].read_bytes() == BIG


@pytest.mark.parametrize("size", [1000, 1_000_000, 2_000_000])
def test_a_spoilt_part_of_an_earlier_run_is_no_obstacle(tmp_path, size):
    with Server({"/a.bin": BIG}) as server:
        part = tmp_path / "cache" / "data" / "downloads" / "toy" / "a.bin.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * size)
        assert obtain(source_of("toy", {"a.bin": BIG}, server.address), None, lambda line: None)["a.bin"].read_bytes() == BIG


def test_the_mirror_replaces_the_address(monkeypatch):
    with Server({"/base/toy/a.bin": BIG}) as server:
        monkeypatch.setenv("CROSSTRAIN_DATA_MIRROR", f"{server.address}/base/")
        assert obtain(source_of("toy", {"a.bin": BIG}), None, lambda line: None)["a.bin"].read_bytes() == BIG
        server.files["/base/toy2/a.bin"] = b"x"
        assert " wrong" in missing(source_of("toy2", {"a.bin": b"y"})).message  # its checksum counts too


@pytest.mark.parametrize("inner", ["", "toy"])
def test_the_users_folder_comes_first(tmp_path, inner):
    folder = tmp_path / "mine" / inner
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(BIG)
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    (packaged / "a.bin").write_bytes(BIG)
    source = source_of("toy", {"a.bin": BIG}, folders=(packaged,))
    assert obtain(source, tmp_path / "mine", lambda line: None)["a.bin"] == folder / "a.bin"
    assert obtain(source, None, lambda line: None)["a.bin"] == packaged / "a.bin"
    assert downloads(tmp_path) == []


def test_a_truncated_file_of_the_user_is_named_not_used_and_stays(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.bin").write_bytes(BIG[:500])
    lines: list[str] = []
    with Server({"/a.bin": BIG}) as server:
        path = obtain(source_of("toy", {"a.bin": BIG}, server.address), mine, lines.append)["a.bin"]
    assert path.read_bytes() == BIG and path.parent != mine
    assert lines[0].startswith(f"toy: not used: {mine}/a.bin is truncated: 500 bytes of 1,000,000, SHA-256 ")
    assert (mine / "a.bin").read_bytes() == BIG[:500]
    error = missing(source_of("toy2", {"a.bin": BIG}), mine)
    assert f"{mine}/a.bin is truncated" in error.message and hashlib.sha256(BIG[:500]).hexdigest() in error.message
    assert "data_dir=" in missing(source_of("toy", {"a.bin": BIG}), tmp_path / "none").message


def test_a_repacked_gzip_with_the_same_content_is_as_good(tmp_path):
    official, repacked = gzip.compress(BIG, mtime=1), gzip.compress(BIG, compresslevel=1, mtime=2)
    file = File("a.gz", len(official), hashlib.sha256(official).hexdigest(), hashlib.sha256(BIG).hexdigest())
    source = Source("toy", ("http://127.0.0.1:9",), (file,))
    (tmp_path / "a.gz").write_bytes(repacked)
    assert obtain(source, tmp_path, lambda line: None)["a.gz"] == tmp_path / "a.gz"
    for bad in (repacked[:-100], gzip.compress(BIG[1:]), b"no gzip"):
        (tmp_path / "a.gz").write_bytes(bad)
        assert download.fault(tmp_path / "a.gz", file)


# -- the formats ---------------------------------------------------------------------------------------------------------------


def request_for(data_dir=None) -> Request:
    return Request(spec(), 8, 0, None, data_dir, {}, lambda line: None)


def test_idx_files_become_images_and_classes(tmp_path):
    contents, values = small_idx()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    recipe = idx.idx_recipe(source_of("toy", contents), request_for(tmp_path))
    loaded = recipe.load()
    assert np.array_equal(loaded["train_inputs"][:, 0], values["train-images-idx3-ubyte.gz"])
    assert np.array_equal(loaded["test_inputs"][:, 0], values["t10k-images-idx3-ubyte.gz"])
    assert np.array_equal(loaded["train_targets"], values["train-labels-idx1-ubyte.gz"])
    assert np.array_equal(loaded["test_targets"], values["t10k-labels-idx1-ubyte.gz"])
    assert loaded["train_inputs"].shape == (50, 1, 28, 28) and loaded["test_targets"].dtype == np.int64
    assert (recipe.kind, recipe.shape, recipe.classes) == ("image", (1, 28, 28), 10)


@pytest.mark.parametrize("content", [b"\0\0\x0d\1\0\0\0\1\0\0\0\0", idx_bytes(np.zeros(5, np.uint8))[:-1], b"\1\2\x08\1\0\0\0\0"])
def test_what_is_no_idx_file_is_named(tmp_path, content):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=r"x\.gz"):
        idx.read_idx(path)


def test_cifar_binary(tmp_path):
    random = np.random.RandomState(1)
    images = random.randint(0, 256, (12, 3, 32, 32)).astype(np.uint8)
    labels = random.randint(0, 10, 12).astype(np.uint8)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for i, member in enumerate([cifar10_module.TEST[0], *cifar10_module.TRAIN, "batches.meta.txt"]):
            rows = np.concatenate([labels[2 * i : 2 * i + 2, None], images[2 * i : 2 * i + 2].reshape(-1, 3072)], axis=1).tobytes()
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{member}")
            entry.size = len(rows)
            archive.addfile(entry, io.BytesIO(rows))
    source = source_of("cifar10", {path.name: path.read_bytes()})
    recipe = cifar10_module.cifar_recipe(source, request_for(tmp_path))
    loaded = recipe.load()
    assert np.array_equal(loaded["train_inputs"], images[2:12]) and np.array_equal(loaded["train_targets"], labels[2:12])
    assert np.array_equal(loaded["test_inputs"], images[:2]) and np.array_equal(loaded["test_targets"], labels[:2])
    white = [255 * scale + offset for scale, offset in zip(recipe.scale, recipe.offset, strict=True)]
    assert white == pytest.approx([(255 - 125.31) / 62.99, (255 - 122.95) / 62.09, (255 - 113.87) / 66.70])


def test_a_copy_of_debians_fashion_mnist_through_the_whole_way(tmp_path):
    if not DEBIAN_FASHION.exists():
        needs("apt", "apt-get install dataset-fashion-mnist")
    data = make("fashion_mnist", batch=64)
    inputs, targets = arrays(data.train)
    test_inputs, test_targets = arrays(data.test)
    assert (inputs.shape, test_inputs.shape, inputs.dtype) == ((60000, 1, 28, 28), (10000, 1, 28, 28), np.uint8)
    assert np.bincount(targets).tolist() == [6000] * 10 and np.bincount(test_targets).tolist() == [1000] * 10
    assert inputs.mean() == pytest.approx(0.2860 * 255, abs=0.02) and inputs.std() == pytest.approx(0.3530 * 255, abs=0.02)
    assert downloads(tmp_path) == []


def test_the_official_sources():
    for module, name in ((mnist_module, "mnist"), (fashion_module, "fashion_mnist"), (cifar10_module, "cifar10")):
        source = module.SOURCE
        assert source.name == name and source.addresses
        assert all(len(file.sha256) == 64 and file.size > 4000 for file in source.files)
    for source in (mnist_module.SOURCE, fashion_module.SOURCE):
        assert {file.name for file in source.files} == set(idx.FILES.values())
    assert mnist_module.SOURCE.version != fashion_module.SOURCE.version


def test_without_network_or_files_mnist_says_what_to_do(monkeypatch):
    monkeypatch.setenv("CROSSTRAIN_DATA_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(OutcomeError) as caught:
        make("mnist")
    assert caught.value.outcome == "data_missing"
    assert "train-images-idx3-ubyte.gz" in caught.value.message and "refused" in caught.value.message
    assert "http://yann.lecun.com/exdb/mnist/" in caught.value.hint and "DIR/mnist" in caught.value.hint
