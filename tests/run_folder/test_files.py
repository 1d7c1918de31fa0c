"""Files of a run's folder: the lock that one process holds, links, and readers that take nothing on trust."""

import fcntl
import os
import threading

import pytest

from hybrid_rl.run_folder import files
from hybrid_rl.run_folder.files import (
    FolderInUse,
    Unreadable,
    alone_in,
    parse_json,
    read_json,
    read_yaml,
    remove,
    remove_unfinished,
)

DEEP = 50_000


def test_a_folder_has_one_holder_and_no_lock_file_afterwards(tmp_path):
    with alone_in(tmp_path), pytest.raises(FolderInUse, match="another process is writing to"), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_its_holder_removed_meanwhile_locks_nothing(tmp_path, monkeypatch):
    """Between another's open and its lock, the holder removes the file and a third process makes and locks a new one."""
    path, flock = tmp_path / ".lock", fcntl.flock
    third = []

    def meanwhile(descriptor, flags):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        third.append(os.open(path, os.O_RDWR | os.O_CREAT))
        flock(third[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with pytest.raises(FolderInUse, match="another process"), alone_in(tmp_path):
        pass
    os.close(third[0])


def test_of_many_that_come_and_go_one_at_a_time_holds_the_folder(tmp_path):
    inside, most, entered = [0], [0], [0]

    def come_and_go():
        for _ in range(300):
            try:
                with alone_in(tmp_path):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    entered[0] += 1
                    inside[0] -= 1
            except FolderInUse:
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert entered[0] > 10


def test_a_linked_lock_keeps_its_target(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    with (
        pytest.raises(FolderInUse, match=r"\.lock cannot be locked: it is a link; remove it"),
        alone_in(tmp_path / "run"),
    ):
        pass
    assert target.read_text() == "precious"


def test_a_lock_that_is_a_folder_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(FolderInUse, match=r"\.lock cannot be locked: Is a directory"), alone_in(tmp_path):
        pass


@pytest.mark.parametrize("dangling", [False, True])
def test_removing_a_link_leaves_what_it_leads_to(tmp_path, dangling):
    target = tmp_path / "elsewhere"
    if not dangling:
        target.mkdir()
        (target / "file").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".rl_000001.old.tmp").symlink_to(target)
    (tmp_path / "link").symlink_to(target)
    remove_unfinished(tmp_path / "run")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "link").is_symlink()
    assert dangling or (target / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", "null", "3", '{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', f'{{"a": {10**30}}}', f'{{"a": {"9" * 5000}}}',
     '{"a": ' + "[" * DEEP, '{"a": ' + "[" * DEEP + "]" * DEEP + "}", '{"a": ' + "[" * 200 + "]" * 200 + "}", "\ud800", b"\xff\xfe{"],
    ids=lambda text: str(text)[:20],
)  # fmt: skip
def test_damaged_json_is_one_kind_of_error(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with pytest.raises(Unreadable, match=r"state\.json is missing or damaged$"):
        read_json(path)


def test_json_that_was_written_is_read(tmp_path):
    value = {"a": [1, -(2**63), 2**63 - 1, 0.1, 1e308, None, True, "ü\u2028"], "b": {"c": {}}}
    files.write_json(tmp_path / "file", value)
    assert read_json(tmp_path / "file") == value
    assert parse_json('{"a": 1}') == {"a": 1}


LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "[" * DEEP,
        "{a: " * DEEP,
        "- 1",
        "a",
        "",
        "? [a]\n: b",
        "1: 2",
        "a: !!python/name:os.system",
        LAUGHS,
        "\x00",
    ],
    ids=lambda t: t[:20],
)
def test_damaged_yaml_is_one_kind_of_error(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(Unreadable, match=r"config\.yaml is missing or damaged$"):
        read_yaml(path)


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_what_is_no_file_is_unreadable(tmp_path, read, monkeypatch):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none" / "file"):
        with pytest.raises(Unreadable):
            read(path)
    (tmp_path / "large").write_text("{}" + " " * 100)
    assert read(tmp_path / "large") == {}
    monkeypatch.setattr(files, "LARGEST", 50)
    with pytest.raises(Unreadable):
        read(tmp_path / "large")
