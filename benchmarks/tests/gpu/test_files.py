"""What travels between two machines: small files, few of them, and never a half-written one."""

import json
import tarfile

import pytest

from benchmarks.command import write_json
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import files


def test_caches_travel_autotuning_results_first_and_within_the_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE_BYTES", files.MIB + 10_000)
    cache, out, back = tmp_path / "cache", tmp_path / "out", tmp_path / "back"
    (cache / "jax" / files.FIRST).mkdir(parents=True)
    out.mkdir()
    for index in range(6):
        (cache / "jax" / f"program-{index}").write_bytes(bytes([index]) * 5000)
    (cache / "jax" / "too large").write_bytes(b"x" * 20_000)
    tuned = cache / "jax" / files.FIRST / "kernel"
    tuned.write_bytes(b"fast")
    found = files.pack_caches(cache, out)
    assert found == {"packed": 4, "packed_bytes": 15_004, "left_out": 4, "left_out_bytes": 35_000}
    packed = sorted(path.name for path in out.iterdir())
    assert packed == ["cache-0.tar", "cache-1.tar", "cache-2.tar"]
    assert all(path.stat().st_size <= files.CACHE_BYTES for path in out.iterdir())
    (out / "cache-9.tar").write_bytes(b"no tar")
    assert files.unpack_caches(out, back) == 4
    assert (back / "jax" / files.FIRST / "kernel").read_bytes() == b"fast"
    for path in (path for path in back.rglob("*") if path.is_file()):
        assert path.read_bytes() == (cache / path.relative_to(back)).read_bytes()


def test_all_files_together_are_fewer_and_smaller_than_a_rented_machine_gives_back():
    count = files.CACHE_FILES + 2  # The results and the logs.
    assert count <= 8
    assert files.CACHE_BYTES < 16 * files.MIB
    assert files.CACHE_FILES * files.CACHE_BYTES < 48 * files.MIB  # The tree that travels may have 64 MiB.


def test_a_file_that_is_being_written_does_not_replace_the_last_whole_one(tmp_path):
    known = {}
    path = tmp_path / "results" / "cpu" / "neumf.json"
    write_json(path, {"arms": 1})
    assert files.collect(tmp_path, ["results/*/neumf.json"], known)
    assert not files.collect(tmp_path, ["results/*/neumf.json"], known)
    path.write_text('{"arms": ')
    assert not files.collect(tmp_path, ["results/*/neumf.json"], known)
    assert known == {"results/cpu/neumf.json": {"arms": 1}}
    files.restore(tmp_path / "again", known)
    assert json.loads((tmp_path / "again" / "results" / "cpu" / "neumf.json").read_text()) == {"arms": 1}


def test_the_end_of_each_log_travels(tmp_path):
    (tmp_path / "logs" / "neumf").mkdir(parents=True)
    (tmp_path / "logs" / "neumf" / "float16.log").write_bytes(b"a" * files.MIB + b"the end")
    files.pack_logs(tmp_path / "logs", tmp_path)
    with tarfile.open(tmp_path / "logs.tar.gz") as tar:
        text = tar.extractfile("neumf/float16.log").read()
    assert len(text) == files.MIB
    assert text.endswith(b"the end")


@pytest.mark.parametrize("device", ["nvidia-h200", "cpu-pretended"])
def test_results_are_unpacked_to_where_the_tables_are_drawn_from(tmp_path, device, capsys):
    arm = {"kernels": 9, "bytes_moved": 2e6, "program_bytes": 3e6, "products": {"gemm f16": 3, "gemm f32": 1}}
    real = arm | {"arm": "float16", "targets": {"dot f16": 3, "__cublas$lt$matmul f32": 1}}
    content = {
        "calls": [{"seconds": 1}],
        "pieces": {"time neumf": {"status": "done", "tail": "text"}},
        "files": {
            f"results/{device.removesuffix('-pretended')}/neumf.json": {
                "arms": {"float16": {"peak_bytes": 4e6}}
            },
            "results/h100-pretended/neumf.json": {"arms": {"float16": {**arm, "products": {"gemm f16": 3}}}},
            "compiled/neumf/float16.json": real,
            "machine.json": {"cores": 16},
        },
    }
    write_json(tmp_path / f"gpu-results-{device}.json", content)
    assert command.main(["--unpack", str(tmp_path), "--results", str(tmp_path / "results")]) == 0
    read = lambda name: json.loads((tmp_path / "results" / name).read_text())
    timed = read(f"{device.removesuffix('-pretended')}/neumf.json")
    assert timed["arms"]["float16"]["peak_bytes"] == 4e6
    assert read(f"{device}/gpu/machine.json") == {"cores": 16}
    assert read(f"{device}/gpu/pieces.json")["pieces"] == {"time neumf": {"status": "done"}}
    line = "| neumf | float16 | 9 / 9 | 2 / 2 | 3 / 3 | 4 | 3 | 4 products, not 3; not in half: gemm f32 |"
    assert line in capsys.readouterr().out
    if device == "cpu-pretended":
        assert command.main(["--unpack", str(tmp_path)]) == 1
        assert "not for the tables" in capsys.readouterr().err


def test_a_folder_without_results_is_an_error(tmp_path, capsys):
    assert command.main(["--unpack", str(tmp_path)]) == 1
    assert "gpu-results-*.json" in capsys.readouterr().err


def outside(tmp_path):
    """Names that lead out of a folder: upwards, absolute, or through a link in it."""
    (tmp_path / "elsewhere").mkdir()
    return ["../evil.py", "logs/../../evil.py", str(tmp_path / "evil.py"), "link/evil.py", "", "."]


def test_a_file_whose_name_leads_out_of_the_folder_is_not_written(tmp_path):
    names, work = outside(tmp_path), tmp_path / "work"
    work.mkdir()
    (work / "link").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    for name in names:
        with pytest.raises(SystemExit, match=r"The results hold a file named .* not inside of"):
            files.restore(work, {"good.txt": "x", name: "x"})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("prefix", ["", "results/"])
def test_unpack_refuses_such_names_and_devices(tmp_path, prefix):
    names, earlier, results = outside(tmp_path), tmp_path / "earlier", tmp_path / "deep" / "results"
    earlier.mkdir()
    results.mkdir(parents=True)
    for name in names[:3]:
        found = {"calls": [], "pieces": {}, "files": {prefix + name: "x"}}
        write_json(earlier / "gpu-results-h100.json", found)
        with pytest.raises(SystemExit, match="not inside of"):
            command.main(["--unpack", str(earlier), "--results", str(results)])
    write_json(earlier / "gpu-results-...json", {"calls": [], "pieces": {}, "files": {}})
    (earlier / "gpu-results-h100.json").unlink()
    with pytest.raises(SystemExit, match="not inside of"):
        command.main(["--unpack", str(earlier), "--results", str(results)])
    assert not list(tmp_path.rglob("evil.py"))
