"""The wheel holds the whole library, and importing its parts pulls in no more than they need."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"package": "remat", "planner": "remat.planner", "profiler": "remat.profiler", "solvers": "remat.solvers"}
"""The folders at the root, and the packages they are installed as."""
DATA = (".html", "py.typed")


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_folders() -> list[Path]:
    return [init.parent.relative_to(ROOT) for top in FOLDERS for init in sorted((ROOT / top).rglob("__init__.py"))]


def installed(path: Path) -> str:
    """Return a path of the tree as a path in the wheel."""
    top, *rest = path.relative_to(ROOT).parts
    return "/".join([*FOLDERS[top].split("."), *rest])


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(sys.prefix))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, so that nothing an earlier build left is packed."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("out")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=copy)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_packages_listed_are_the_folders_that_exist():
    setuptools = pyproject()["tool"]["setuptools"]
    names = [installed(ROOT / folder).replace("/", ".") for folder in package_folders()]
    assert sorted(setuptools["packages"]) == sorted(names)
    assert setuptools["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


def test_the_wheel_contains_every_module_and_data_file(wheel: zipfile.ZipFile):
    files = [path for top in FOLDERS for path in (ROOT / top).rglob("*") if path.is_file()]
    wanted = {installed(path) for path in files if path.suffix == ".py" or path.name.endswith(DATA)}
    packed = {name for name in wheel.namelist() if name.startswith("remat/")}
    assert wanted == packed
    assert {installed(ROOT / name / "py.typed") for name in FOLDERS} <= packed


def test_no_file_of_a_package_is_of_a_kind_that_the_wheel_leaves_out():
    files = [path for top in FOLDERS for path in (ROOT / top).rglob("*") if path.is_file()]
    left_out = [path for path in files if path.suffix not in (".py", ".pyc") and not path.name.endswith(DATA)]
    assert left_out == []


def test_the_wheel_puts_nothing_beside_remat_and_carries_the_licence(wheel: zipfile.ZipFile):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"remat", "remat-0.1.0.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_no_folder_remat_shadows_the_installed_package():
    assert not (ROOT / "remat").exists()


def test_importing_the_solvers_imports_no_torch():
    loaded = run_python("import remat.solvers, sys; print('torch' in sys.modules, len(remat.solvers.SOLVERS) > 0)")
    assert loaded == "False True"


def test_a_users_own_profiler_file_is_not_in_the_way(tmp_path: Path):
    (tmp_path / "profiler.py").write_text("raise RuntimeError('the wrong profiler')\n")
    (tmp_path / "script.py").write_text("from remat.profiler import profile\nprint(profile.__module__)\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "remat.profiler.profiling", done.stderr


def test_importing_the_face_imports_no_torch_until_a_name_is_used():
    loaded = "'torch' in sys.modules"
    missing = "[name for name in dir(remat) if getattr(remat, name) is None]"
    code = f"import remat, sys; print(remat.__version__, {loaded}, {missing}, callable(remat.plan), {loaded})"
    assert run_python(code).split()[1:] == ["False", "[]", "True", "True"]


def test_importing_the_planner_prints_nothing_and_draws_nothing():
    loaded = run_python("import remat.planner, sys; print('matplotlib.pyplot' in sys.modules)")
    assert loaded == "False"


def test_every_dependency_is_pinned_in_the_constraints():
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    project = pyproject()
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {requirement.split(">=")[0].split("[")[0].lower() for requirement in asked}
    assert names <= pinned
