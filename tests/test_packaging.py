"""What is installed: every package once, under one name, from a wheel, an sdist and a checkout."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"kvjax": "kvjax", "pallas_kernels": "pallas_kernels", "train": "kvjax.train",
           "eval": "kvjax.eval"}  # fmt: skip

# Imports every module of the four packages, from a folder that is not the checkout, and prints
# each file that was imported under two names.
IMPORT_ALL = """
import collections, importlib, os, pkgutil, sys
names = ["kvjax", "kvjax.train", "kvjax.eval", "pallas_kernels"]
for name in names:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if found.name.startswith("kvjax.eval.peers."):  # programs for other Pythons: they compile
            assert found.module_finder.find_spec(found.name).loader.get_code(found.name)
        else:
            importlib.import_module(found.name)
files = collections.defaultdict(list)
for name, module in list(sys.modules.items()):
    path = getattr(module, "__file__", None)
    if path and any(n in sys.modules and name.split(".")[0] in ("kvjax", "pallas_kernels", "eval",
                    "train") for n in names):
        files[os.path.realpath(path)].append(name)
twice = {p: n for p, n in files.items() if len(n) > 1}
assert not twice, twice
for name in ("train", "eval"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise AssertionError(f"a top-level package {name!r} is importable")
from kvjax.data import moby_dick
assert moby_dick().startswith("CHAPTER 1. Loomings.")
print("ok", len(files))
"""


def packages_in_folders():
    """The import names of all folders with an __init__.py."""
    found = set()
    for folder, name in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def test_every_package_is_listed():
    """pyproject.toml lists exactly the packages that exist, so a wheel lacks none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(project["tool"]["setuptools"]["packages"]) == packages_in_folders()


def test_every_folder_of_modules_is_a_package():
    """A folder with modules and no __init__.py would be missing from the wheel."""
    for folder in FOLDERS:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_installs(kind, tmp_path):
    """A new environment with its own dependencies imports everything, once."""
    # A copy, so that no build folder or egg-info of the checkout takes part.
    tracked = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    copy = tmp_path / "checkout"
    for name in tracked:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    if kind == "editable":
        run(python, "-m", "pip", "install", "-q", "-e", f"{copy}[train,eval]")
    else:
        run(sys.executable, "-m", "build", f"--{kind}", "--outdir", tmp_path / "dist", copy)
        (built,) = (tmp_path / "dist").iterdir()
        run(python, "-m", "pip", "install", "-q", f"kvjax[train,eval] @ {built.as_uri()}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    out = run(python, "-c", IMPORT_ALL, cwd=elsewhere, env=environment)
    assert out.startswith("ok")
    kvjax = tmp_path / "venv" / "bin" / "kvjax"
    assert "streaming_llm" in run(kvjax, "recipes", "--json", cwd=elsewhere, env=environment)
