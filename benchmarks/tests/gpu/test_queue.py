"""The queue: order, failures, limits, the deadline, and that a killed call goes on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import queue
from benchmarks.gpu.queue import Piece, Queue

ROOT = Path(queue.__file__).parents[2]


def piece(name, code, **settings):
    """A piece that runs some Python, and leaves its name in a file when it begins and when it ends."""
    note = f"print('{name}', file=open('{{work}}/ran', 'a'))\n"
    settings = {"seconds": 0.1, "limit": 20, **settings}
    return Piece(name, ("-S", "-c", note + code), **settings)


def make(tmp_path, pieces, seconds=60.0, records=None, **settings):
    found = Queue(
        pieces=pieces,
        work=tmp_path,
        deadline=time.monotonic() + seconds + queue.ENDING,
        environment=dict(os.environ),
        slots={},
        records={} if records is None else records,
        files={},
        say=lambda _: None,
        poll=0.02,
        **settings,
    )
    found.run()
    return found


def ran(tmp_path):
    return (tmp_path / "ran").read_text().split()


def test_a_piece_that_failed_says_why_and_is_tried_again_after_all_others(tmp_path):
    fails = piece("fails", "raise ValueError('no such thing')")
    found = make(tmp_path, [fails, piece("a", ""), piece("b", "")])
    assert ran(tmp_path) == ["fails", "a", "b", "fails"]
    assert found.records["fails"]["status"] == "failed"
    assert found.records["fails"]["failures"] == 2
    assert found.records["fails"]["why"] == "exit status 1; ValueError: no such thing"
    assert {found.records[name]["status"] for name in "ab"} == {"done"}


def test_a_call_goes_on_with_what_is_not_done_and_leaves_failures_for_the_end(tmp_path):
    records = {
        "done": {"status": "done", "seconds": 1.0},
        "fails": {"status": "failed", "failures": 2},
        "running": {"status": "running", "tries": 1},
        "crashed": {"status": "running", "tries": 2, "interrupted": 1},
    }
    pieces = [piece(name, "") for name in ("done", "fails", "crashed", "running", "new")]
    found = make(tmp_path, pieces, records=records)
    assert ran(tmp_path) == ["running", "new", "crashed", "fails"]
    assert {record["status"] for record in found.records.values()} == {"done"}


def test_a_piece_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    code = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-S', '-c', "
    code += '\'import time; time.sleep(1.5); open("{work}/survived", "w")\'])\ntime.sleep(60)'
    found = make(tmp_path, [piece("slow", code, limit=0.4)], seconds=8)
    assert found.records["slow"]["why"].startswith("it took longer than 0 s")
    time.sleep(1.6)
    assert not (tmp_path / "survived").exists()


def test_the_deadline_cuts_a_piece_off_and_this_is_no_failure(tmp_path):
    began = time.monotonic()
    pieces = [piece("long", "import time; time.sleep(60)"), piece("next", "")]
    found = make(tmp_path, pieces, seconds=0.5)
    assert time.monotonic() - began < 2
    assert found.records["long"]["status"] == "cut off"
    assert "failures" not in found.records["long"]
    assert found.records["next"] == {}


def test_a_piece_is_not_started_without_the_time_for_it(tmp_path):
    make(tmp_path, [piece("large", "", seconds=100), piece("small", "")], seconds=5)
    assert ran(tmp_path) == ["small"]


def test_pieces_that_compile_run_beside_each_other_and_never_beside_one_that_is_timed(tmp_path):
    spans = "import time; a = time.time(); time.sleep(0.4); print('NAME', a, time.time(), "
    spans += "file=open('{work}/spans', 'a'))"
    code = lambda name: spans.replace("NAME", name)
    compiles = [piece(name, code(name), alone=False, lane=name) for name in ("c1", "c2", "c3")]
    timed = [
        piece("t1", code("t1"), needs=("c1", "c2")),
        piece("t2", code("t2"), needs=("c3",)),
        piece("t3", code("t3")),
    ]
    make(tmp_path, [*compiles[:2], timed[0], compiles[2], *timed[1:]])
    spans = [line.split() for line in (tmp_path / "spans").read_text().splitlines()]
    spans = {name: (float(first), float(last)) for name, first, last in spans}
    overlap = lambda a, b: spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]
    assert overlap("c1", "c2")
    for name in ("t1", "t2", "t3"):
        assert not [other for other in spans if other != name and overlap(name, other)]
    assert max(spans["c1"][1], spans["c2"][1]) < spans["t1"][0]
    assert spans["c3"][1] < spans["t2"][0]


def test_a_piece_without_its_package_says_so_and_runs_once_it_is_there(tmp_path):
    records = {}
    lacking = piece("lacking", "", packages=("no_such_package",))
    make(tmp_path, [lacking, piece("a", "", needs=("lacking",))], records=records)
    assert records["lacking"]["why"] == "not installed: no_such_package"
    assert ran(tmp_path) == ["a"]
    make(tmp_path, [piece("lacking", "", packages=("json",))], records=records)
    assert records["lacking"]["status"] == "done"


def test_without_a_machine_that_works_nothing_is_run(tmp_path):
    gate = piece("machine", "raise SystemExit('no GPU')", gate=True)
    found = make(tmp_path, [gate, piece("a", "")], records={"machine": {"status": "done"}})
    assert ran(tmp_path) == ["machine"]
    assert found.records["machine"]["why"] == "exit status 1; no GPU"


def test_what_a_piece_has_written_is_kept_while_it_still_runs(tmp_path):
    code = "import time; open('{work}/found.json', 'w').write('{{\"ms\": 1}}'); time.sleep(60)"
    saved = []
    a = piece("a", code.replace("{{", "{").replace("}}", "}"), writes=("found.json",))
    made = make(tmp_path, [a], seconds=1, save=saved.append)
    assert made.files == {"found.json": {"ms": 1}}
    assert saved.count(False) >= 3  # At the start, when the piece starts, when the file is there.


# The command, with pieces of ours.

COMMAND = """
import sys
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import queue
from benchmarks.gpu.queue import Piece

queue.ENDING = 1.0
code = "import time, pathlib; work = pathlib.Path({work!r}); time.sleep(SECONDS); "
code += "open(LEDGER, 'a').write('NAME '); (work / 'NAME.json').write_text('[1]'); "
code += "(work / 'cache' / 'jax' / 'NAME').write_text('x')"

def piece(name, seconds, more=""):
    text = code.replace("{work!r}", "'{work}'").replace("SECONDS", str(seconds)).replace("NAME", name)
    text = text.replace("LEDGER", repr(sys.argv[1])) + more
    return Piece(name, ("-S", "-c", text), 0.1, 30, writes=(f"{name}.json",))

command.make_pieces = lambda pretend: [
    piece("first", 0.1), piece("broken", 0.1, "; raise RuntimeError('planned')"), piece("second", 1),
    piece("third", 0.1), piece("endless", 60),
]
sys.exit(command.main(sys.argv[2:]))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    started = []

    def start(minutes):
        arguments = [sys.executable, "command.py", tmp_path / "ledger", "--pretend"]
        arguments += ["--minutes", str(minutes), "--out", tmp_path / "out"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def test_a_command_that_is_killed_goes_on_where_it_stopped_and_keeps_its_deadline(tmp_path, start):
    results = tmp_path / "out" / "gpu-results-cpu-pretended.json"
    ledger = tmp_path / "ledger"
    status = lambda name: json.loads(results.read_text())["pieces"].get(name, {}).get("status")
    killed = start(5)
    while not results.exists() or status("second") != "running":
        time.sleep(0.05)
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert status("first") == "done"
    assert status("broken") == "failed"
    time.sleep(1.3)
    assert ledger.read_text().split() == ["first", "broken"]  # The piece died with the command.

    began = time.monotonic()
    again = start(0.13)
    printed, _ = again.communicate()
    assert time.monotonic() - began < 60 * 0.13 + 10
    assert again.returncode == 0
    # It is done once; the failed piece comes last, and the endless one before it is cut off.
    assert ledger.read_text().split() == ["first", "broken", "second", "third"]
    assert "broken: failed. exit status 1; RuntimeError: planned" in printed
    assert "endless: cut off" in printed
    found = json.loads(results.read_text())
    assert set(found["files"]) == {"first.json", "broken.json", "second.json", "third.json"}
    assert len(found["calls"]) == 2
    assert found["calls"][1]["caches"]["packed"] == 4  # Those of the first call came along.
