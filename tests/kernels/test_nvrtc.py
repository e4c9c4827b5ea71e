"""CUDA C++ to cubins through NVRTC: headers, names, errors, the cache. Needs NVRTC's wheel, no GPU."""

from pathlib import Path

import pytest

from blockscale.errors import BlockscaleError, MissingDependencyError
from blockscale.kernels import nvrtc
from blockscale.kernels.nvrtc import SOURCES, Program, compile_program
from tests.kernels.compiled import compile_cuda

ARCHS = ("sm_80", "sm_90a", "sm_110a", "sm_121a")
SOURCE = """#include "outer.cuh"
template <int N> __global__ void scale(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]) * N; }
extern "C" __global__ void plain(float* x) { x[0] = FACTOR; }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "inner.cuh").write_text("__device__ inline float two() { return 2.0f; }\n", encoding="utf-8")
    outer = (
        '#include <cuda_bf16.h>\n#include "inner.cuh"\n__device__ inline float twice(float x) { return x * two(); }\n'
    )
    (tmp_path / "outer.cuh").write_text(outer, encoding="utf-8")
    (tmp_path / "s.cu").write_text(SOURCE, encoding="utf-8")
    return tmp_path / "s.cu"


def program(source: Path, factor: str = "3.0f") -> Program:
    return Program(source, ("scale<5>", "scale<7>", "plain"), (("FACTOR", factor),))


def test_a_program_is_compiled_once(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_program(program(source), "sm_90a")
    assert set(first.symbols) == {"scale<5>", "scale<7>", "plain"}
    assert first.symbols["plain"] == "plain"
    assert first.data.startswith(b"\x7fELF")
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_program(program(source), "sm_90a") == first


@pytest.mark.parametrize("change", ["source", "header", "define", "arch", "version"])
def test_whatever_it_depends_on_makes_it_another(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    compile_program(program(source), "sm_90a")
    factor, arch = "3.0f", "sm_90a"
    if change == "source":
        source.write_text(SOURCE + "\n// more\n", encoding="utf-8")
    elif change == "header":
        (source.parent / "inner.cuh").write_text("__device__ inline float two() { return 3.0f; }\n", encoding="utf-8")
    elif change == "define":
        factor = "4.0f"
    elif change == "arch":
        arch = "sm_80"
    else:
        monkeypatch.setattr(nvrtc, "_nvrtc_version", lambda: (99, 0))
    compile_program(program(source, factor), arch)
    assert len(list(folder.iterdir())) == 2


def test_an_error_of_the_compiler_names_file_and_line(source: Path, folder: Path) -> None:
    source.write_text("__global__ void scale( {", encoding="utf-8")
    with pytest.raises(BlockscaleError, match=r"s\.cu does not compile, sm_90a: .*s\.cu\(1\): error"):
        compile_program(Program(source, ("scale",)), "sm_90a")
    assert not folder.exists() or not list(folder.iterdir())


def test_a_name_that_is_no_kernel(source: Path) -> None:
    with pytest.raises(BlockscaleError, match="does not compile"):
        compile_program(Program(source, ("missing<1>",), (("FACTOR", "1"),)), "sm_90a")


def test_an_architecture_that_there_is_not(source: Path) -> None:
    with pytest.raises(BlockscaleError, match="sm_13"):
        compile_program(program(source), "sm_13")


def test_without_a_driver_loading_says_so(source: Path) -> None:
    try:
        nvrtc._driver()
    except MissingDependencyError:
        with pytest.raises(MissingDependencyError, match="driver cannot be loaded") as caught:
            nvrtc.load(program(source), "plain", "sm_90a")
        assert "blockscale[kernels]" in caught.value.hint
    else:
        pytest.skip("there is a driver")


def test_machine_code_is_read_as_it_is(source: Path) -> None:
    found = compile_cuda(program(source), "sm_90a")
    assert found["scale<5>"].count("FMUL") >= 1
    assert found["scale<5>"].count("EXIT") >= 1
    assert 0 < found["plain"].registers <= 32
    assert found["plain"].num_spills == 0
    assert found["plain"].count("FMU") == 0  # a name is not the beginning of another
    spilling = (
        "__global__ void f(float* x, int n) { float a[256]; for (int i = 0; i < 256; i++) a[i] = x[i]; x[0] = a[n]; }"
    )
    source.write_text(spilling, encoding="utf-8")
    (kernel,) = compile_cuda(Program(source, ("f",)), "sm_90a").values()
    assert kernel.stack_bytes >= 1024
    assert kernel.num_spills > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_reading_memory_compiles_for_every_gpu(arch: str) -> None:
    kernel = compile_cuda(Program("read.cu", ("read_all",)), arch)["read_all"]
    assert kernel.count("LDG") >= 8
    assert sum(n for m, n in kernel.mnemonics.items() if m.startswith("LDG") and ".128" in m) >= 8
    assert kernel.num_spills == 0


def test_every_source_is_shipped() -> None:
    import tomllib

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    patterns = tomllib.loads(text)["tool"]["setuptools"]["package-data"]["blockscale"]
    room = SOURCES.parent
    files = [p for p in room.rglob("*") if p.is_file() and p.suffix in (".cu", ".cuh", ".c", ".h", ".json")]
    assert files
    for file in files:
        assert any(file.relative_to(room.parent).match(pattern) for pattern in patterns), file
