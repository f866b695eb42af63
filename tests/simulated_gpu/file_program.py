"""A program that writes, overwrites, removes and renames files; run by test_files.py in a folder that has some."""

import io
import logging.handlers
import os
import posix
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path


def refused(kind: type[OSError], action: Callable[[], object]) -> None:
    try:
        action()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


# an existing file, written and read again under its own name
with open("metrics.json", "w") as file:
    file.write("made up")
    assert file.name == "metrics.json"
assert Path("metrics.json").read_text() == "made up"
assert os.path.getsize("metrics.json") == 7
with open("log.txt", "a") as file:
    file.write("more\n")
assert Path("log.txt").read_text() == "old\nmore\n"
Path("state.tmp").write_text("new")
os.replace("state.tmp", "state.json")
assert Path("state.json").read_text() == "new"
assert not Path("state.tmp").exists()
refused(FileExistsError, lambda: open("other.txt", "x"))
os.truncate("other.txt", 1)
assert os.stat("other.txt").st_size == 1
os.chmod("kept/file", 0o400)

# a checkpoint that a rotation removes, and makes again
shutil.rmtree("out/checkpoint-1")
assert not os.path.exists("out/checkpoint-1/weights")
assert os.listdir("out") == [entry.name for entry in os.scandir("out")] == ["checkpoint-2"]
os.makedirs("out/checkpoint-1")
Path("out/checkpoint-1/weights").write_text("made up")
assert os.listdir("out/checkpoint-1") == ["weights"]
os.rename("out/checkpoint-2", "out/best")
assert Path("out/best/weights").read_text() == "2"
assert not Path("out/checkpoint-2").exists()
os.remove("latest")
os.symlink("out/best", "latest")
assert os.listdir("latest") == ["weights"]
refused(OSError, lambda: os.rmdir("kept"))

# log files that turn, links, databases
turning = logging.handlers.RotatingFileHandler("log.txt", maxBytes=8, backupCount=2)
for _ in range(3):
    turning.emit(logging.makeLogRecord({"msg": "12345678"}))
turning.close()
os.link("kept/file", "hard")
with open("hard", "a") as file:
    file.write("!")
for name in ("old.db", "new.db"):
    database = sqlite3.connect(name)
    database.execute("create table runs (loss)")
    database.commit()
    database.close()

# new files, also by other processes
Path("made").mkdir()
subprocess.run(["touch", "made/by-touch"], check=True)
with tempfile.NamedTemporaryFile() as temporary:
    temporary.write(b"x")
tempfile.mkdtemp()
code = "print(open('metrics.json').read(), end=''); open('by-child', 'w')"
child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
assert child.stdout == "made up"
if os.fork() == 0:
    Path("metrics.json").write_text("forked")
    os._exit(0)
os.wait()
assert Path("metrics.json").read_text() == "forked"

# functions that the program kept cannot do what the replaced ones do
refused(PermissionError, lambda: io.FileIO("kept/file", "w"))
refused(PermissionError, lambda: posix.remove("kept/file"))
refused(PermissionError, lambda: posix.rename("kept/file", "elsewhere"))
refused(FileNotFoundError, lambda: open("nowhere/file", "w"))

# the network ends at this machine
refused(OSError, lambda: urllib.request.urlopen("https://example.org"))
refused(OSError, lambda: socket.create_connection(("192.0.2.1", 80)))
with socket.create_server(("localhost", 0)) as server:
    socket.create_connection(server.getsockname()).close()
print("all files as expected")
