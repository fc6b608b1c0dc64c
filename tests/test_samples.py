"""The samples file: what a worker writes is what the driver reads, also after a SIGKILL, a truncation, a full file."""

import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from crosstrain import samples
from crosstrain_worker import record
from crosstrain_worker.record import BLOCK, FIRST_STEP, ITERATION, Recorder

SOURCES = str(Path(record.__file__).resolve().parents[1])


def write(path: Path, rows: list[tuple], capacity: int = 8) -> Path:
    recorder = Recorder(str(path), capacity=capacity)
    for row in rows:
        recorder.add(*row)
    recorder.close()
    return path


def table(rows: list[tuple]) -> np.ndarray:
    nan = float("nan")
    return np.array([(*row, 0.0, nan, nan)[:9] if len(row) == 6 else row for row in rows], samples.ROW)


def test_layout_is_the_protocols(tmp_path):
    path = write(tmp_path / "s.bin", [(7, ITERATION, 1, 2, 1.5, 0.25, 0.125, 3.5, 0.75), (8, BLOCK, 50, 0, 2.5, 5.0)])
    raw = path.read_bytes()
    assert len(raw) == 64 + 2 * 56
    assert struct.unpack_from("<8sIIq", raw) == (b"CTSAMPL1", 56, 64, 2)
    assert raw[24:64] == bytes(40)
    assert struct.unpack_from("<iiiiddddd", raw, 64) == (7, 3, 1, 2, 1.5, 0.25, 0.125, 3.5, 0.75)
    assert struct.unpack_from("<iiiidd", raw, 120) == (8, 4, 50, 0, 2.5, 5.0)
    unknown = struct.unpack_from("<ddd", raw, 152)
    assert unknown[0] == 0.0 and np.isnan(unknown[1]) and np.isnan(unknown[2])


def test_read_gives_the_fields_by_name(tmp_path):
    rows = samples.read(write(tmp_path / "s.bin", [(7, ITERATION, 1, 2, 1.5, 0.25, 0.125, 3.5, 0.75)]))
    assert samples.ROW.itemsize == record.ROW_SIZE == 56
    assert {name: rows[name][0] for name in rows.dtype.names} == {
        "iteration": 7, "phase": 3, "size": 1, "epoch": 2, "start": 1.5, "duration": 0.25, "data_wait": 0.125,
        "loss": 3.5, "accuracy": 0.75,
    }  # fmt: skip


@pytest.mark.parametrize("capacity", [1, 3, 1000])
def test_a_full_file_grows_and_keeps_its_rows(tmp_path, monkeypatch, capacity):
    monkeypatch.setattr(record, "CHUNK", 5)
    path = write(tmp_path / "s.bin", [(i, ITERATION, 1, 0, float(i), 0.5) for i in range(333)], capacity)
    rows = samples.read(path)
    assert rows["iteration"].tolist() == list(range(333))
    assert (rows["duration"] == 0.5).all()


def test_add_does_not_grow_the_file_within_what_was_reserved(tmp_path):
    path = tmp_path / "s.bin"
    recorder = Recorder(str(path), capacity=1)
    recorder.reserve(200000)
    size = path.stat().st_size
    assert path.stat().st_blocks * 512 >= size > 200000 * 56  # real blocks, not a hole
    for i in range(200000):
        recorder.add(i, ITERATION, 1, 0, 0.0, 0.0)
    assert path.stat().st_size == size
    recorder.close()
    assert path.stat().st_size == 64 + 200000 * 56
    recorder.close()


def test_set_loss_changes_only_that_rows_loss_and_accuracy(tmp_path):
    recorder = Recorder(str(tmp_path / "s.bin"))
    first, second = recorder.add(0, ITERATION, 1, 0, 1.0, 0.5), recorder.add(1, ITERATION, 1, 0, 2.0, 0.25, 0.125)
    assert (first, second) == (0, 1)
    recorder.set_loss(second, 2.5, 0.5)
    with pytest.raises(IndexError, match=r"row 2 of .*s\.bin, which has 2"):
        recorder.set_loss(2, 0.0)
    recorder.close()
    rows = samples.read(tmp_path / "s.bin")
    assert np.isnan(rows["loss"][0]) and np.isnan(rows["accuracy"][0])
    assert tuple(rows[1]) == (1, 3, 1, 0, 2.0, 0.25, 0.125, 2.5, 0.5)


def test_a_new_recorder_forgets_the_old_file(tmp_path):
    path = write(tmp_path / "s.bin", [(i, ITERATION, 1, 0, 0.0, 1.0) for i in range(9)])
    write(path, [(5, BLOCK, 1, 0, 0.0, 1.0)])
    assert samples.read(path)["iteration"].tolist() == [5]


def test_no_file_where_the_folder_is_missing(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        Recorder(str(tmp_path / "nowhere" / "s.bin"))


WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from crosstrain_worker.record import ITERATION, Recorder
recorder = Recorder(sys.argv[1], capacity=100)
for i in itertools.count():
    recorder.set_loss(recorder.add(i, ITERATION, 1, 0, float(i), 2.0 * i), 3.0 * i)
    if i == 999:
        print("ready", flush=True)
"""


def test_a_reader_never_sees_less_than_was_written(tmp_path):
    """The count only grows and a loss is unknown or right, at every moment: a killed worker leaves what a reader sees."""
    path = tmp_path / "s.bin"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), SOURCES], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        seen = 1000
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for _ in range(100):
                count, last = samples.tail(path)
                assert count >= seen and last["iteration"] == count - 1
                assert math.isnan(last["loss"]) or last["loss"] == 3.0 * last["iteration"]
                seen = count
        assert seen > 1000
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05])
def test_a_killed_writer_loses_no_row(tmp_path, delay):
    path = tmp_path / "s.bin"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), SOURCES], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    rows = samples.read(path)
    assert len(rows) >= 1000
    assert rows["iteration"].tolist() == list(range(len(rows)))
    assert (rows["duration"] == 2.0 * rows["iteration"]).all()
    assert (rows["loss"][:-1] == 3.0 * rows["iteration"][:-1]).all()  # the last may be killed before its loss
    count, last = samples.tail(path)
    assert count == len(rows) and last["iteration"] == count - 1


def test_read_and_tail_while_the_worker_writes(tmp_path):
    path = tmp_path / "s.bin"
    assert samples.tail(path) == (0, None)
    recorder = Recorder(str(path))
    assert samples.tail(path) == (0, None)
    assert len(samples.read(path)) == 0
    recorder.add(4, FIRST_STEP, 1, 0, 1.0, 0.5)
    recorder.add(5, ITERATION, 1, 0, 2.0, 0.25)
    count, last = samples.tail(path)
    assert (count, last["iteration"], last["phase"], last["duration"]) == (2, 5, ITERATION, 0.25)
    assert samples.read(path)["iteration"].tolist() == [4, 5]
    recorder.close()


def damaged(path: Path, count: int = 3) -> bytes:
    return write(path, [(i, ITERATION, 1, 0, 0.0, 1.0) for i in range(count)]).read_bytes()


@pytest.mark.parametrize(
    ("change", "words", "whole"),
    [
        (lambda raw: raw[: 64 + 56 + 20], r"truncated, the header says 3 rows; 1 rows are whole", 1),
        (lambda raw: raw[:64], r"truncated, the header says 3 rows; 0 rows are whole", 0),
        (lambda raw: raw[:63], r"not a samples file .*0 rows are whole", 0),
        (lambda raw: b"", r"not a samples file \(0 bytes", 0),
        (lambda raw: b"CTSAMPL2" + raw[8:], r"not a samples file", 0),
        (lambda raw: raw[:8] + struct.pack("<I", 48) + raw[12:], r"bad header, row size 48", 0),
        (lambda raw: raw[:12] + struct.pack("<I", 32) + raw[16:], r"bad header.* header size 32", 0),
        (lambda raw: raw[:16] + struct.pack("<q", -1) + raw[24:], r"bad header.* -1 rows", 0),
        (lambda raw: raw[:16] + struct.pack("<q", 2**60) + raw[24:], r"truncated.* 3 rows are whole", 3),
    ],
)
def test_a_damaged_file_is_one_line_and_its_whole_rows(tmp_path, change, words, whole):
    path = tmp_path / "s.bin"
    path.write_bytes(change(damaged(path)))
    with pytest.raises(samples.SamplesError, match=words) as caught:
        samples.read(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert caught.value.rows["iteration"].tolist() == list(range(whole))
    assert caught.value.rows.dtype == samples.ROW


def test_a_missing_file(tmp_path):
    with pytest.raises(samples.SamplesError, match=r"samples\.3\.bin: can not be read \(No such file") as caught:
        samples.read(tmp_path / "samples.3.bin")
    assert len(caught.value.rows) == 0
    os.mkdir(tmp_path / "folder")
    with pytest.raises(samples.SamplesError, match="can not be read"):
        samples.read(tmp_path / "folder")


def test_room_behind_the_rows_is_no_damage(tmp_path):
    path = tmp_path / "s.bin"
    path.write_bytes(damaged(path) + bytes(5))  # killed while the file grew
    assert samples.read(path)["iteration"].tolist() == [0, 1, 2]


def test_tail_of_a_damaged_file_is_nothing(tmp_path):
    path = tmp_path / "s.bin"
    raw = damaged(path)
    for short in (raw[:100], raw[:30], b"x" * 100, raw[:16] + struct.pack("<q", 99) + raw[24:]):
        path.write_bytes(short)
        assert samples.tail(path) == (0, None)


def test_merge_takes_the_slowest_rank():
    a = table([(0, 2, 1, 0, 1.0, 9.0), (0, 3, 1, 0, 10.0, 2.0, 0.5, 1.0, 0.25), (1, 3, 1, 0, 12.5, 3.0, 0.0, 2.0, 0.5)])
    b = table([(0, 2, 1, 0, 0.5, 8.0), (0, 3, 1, 0, 10.5, 4.0, 0.25, 3.0, 0.75), (1, 3, 1, 0, 12.0, 1.0, 1.0, np.nan, np.nan)])
    rows, note = samples.merge([a, b])
    assert note == ""
    assert rows["start"].tolist() == [0.5, 10.0, 12.0]
    assert rows["duration"].tolist() == [9.0, 4.0, 3.0]
    assert rows["data_wait"].tolist() == [0.0, 0.5, 1.0]
    assert rows["loss"][1:].tolist() == [2.0, 2.0]  # the mean of those that know it
    assert rows["accuracy"][1:].tolist() == [0.5, 0.5]
    assert np.isnan(rows["loss"][0])
    assert rows["phase"].tolist() == [2, 3, 3] and rows["iteration"].tolist() == [0, 0, 1]
    assert a["duration"].tolist() == [9.0, 2.0, 3.0]  # the ranks' own rows stay


def test_merge_keeps_the_order_of_interleaved_phases():
    order = [(0, 5, 1, 0), (1, 5, 1, 0), (1, 6, 1, 0), (2, 5, 1, 1), (2, 6, 1, 1)]
    rank = table([(*key, float(i), 1.0) for i, key in enumerate(order)])
    slower = rank.copy()
    slower["duration"] *= 2
    rows, _ = samples.merge([rank, slower])
    assert [tuple(row)[:4] for row in rows] == order
    assert (rows["duration"] == 2).all()


def test_merge_cuts_to_the_common_prefix_of_each_phase():
    a = table([(i, 3, 1, 0, float(i), 1.0) for i in range(5)] + [(5, 4, 10, 0, 5.0, 10.0)])
    b = table([(i, 3, 1, 0, float(i), 2.0) for i in range(3)])
    for ranks in ([a, b], [b, a]):
        rows, note = samples.merge(ranks)
        assert rows["iteration"].tolist() == [0, 1, 2] and (rows["duration"] == 2).all()
        assert "phase iteration: the ranks have" in note and "the 3 they have in common" in note
        assert "phase block" in note and "\n" not in note


def test_merge_stops_where_ranks_did_different_work():
    a = table([(0, 4, 10, 0, 0.0, 1.0), (10, 4, 10, 0, 1.0, 1.0), (20, 4, 10, 0, 2.0, 1.0)])
    b = a.copy()
    b["size"][2] = 20
    rows, note = samples.merge([a, b])
    assert rows["iteration"].tolist() == [0, 10] and "the 2 they have in common" in note


def test_merge_of_one_and_of_none():
    a = table([(0, 3, 1, 0, 0.0, 1.0)])
    rows, note = samples.merge([a])
    assert (rows.tobytes(), note) == (a.tobytes(), "")
    rows, note = samples.merge([])
    assert len(rows) == 0 and rows.dtype == samples.ROW and note


def test_parquet_holds_every_raw_row_of_every_rank(tmp_path):
    import pandas as pd

    a = table([(i, 3, 1, 0, float(i), 1.0, 0.5, 2.0, 0.25) for i in range(3)])
    b = table([(i, 4, 50, 1, float(i), 2.0) for i in range(2)])
    samples.write_parquet([a, b], tmp_path / "samples.parquet")
    frame = pd.read_parquet(tmp_path / "samples.parquet")
    assert list(frame.columns) == ["rank", *samples.ROW.names]
    assert frame["rank"].tolist() == [0, 0, 0, 1, 1]
    assert frame["iteration"].tolist() == [0, 1, 2, 0, 1] and frame["size"].tolist() == [1, 1, 1, 50, 50]
    assert frame["duration"].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert frame["loss"].isna().tolist() == [False, False, False, True, True]
    samples.write_parquet([], tmp_path / "none.parquet")
    assert len(pd.read_parquet(tmp_path / "none.parquet")) == 0


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from crosstrain_worker.record import ITERATION, Recorder
recorder = Recorder(sys.argv[1], capacity=10)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    for i in range(11):
        recorder.add(i, ITERATION, 1, 0, 0.0, 1.0)
except OSError as error:
    print(recorder.count, error)
recorder.close()
"""


def test_no_room_is_an_error_with_the_path_and_keeps_the_rows(tmp_path):
    path = tmp_path / "s.bin"
    out = subprocess.run([sys.executable, "-c", FULL, str(path), SOURCES], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("10 ") and str(path) in out.stdout
    assert samples.read(path)["iteration"].tolist() == list(range(10))
