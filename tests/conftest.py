"""Settings of every test: eight CPU devices, checked shapes, fixed hypothesis profiles."""

import mmap
import os
import pathlib

import jaxlib

# Before jax is imported anywhere. libtpu is installed with [test] to compile ahead of time only:
# it must not look for a chip, nor ask the network for one.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
_asked = os.environ.get("XLA_FLAGS", "")
_flags = [_asked]
if "xla_force_host_platform_device_count" not in _asked:
    _flags.append("--xla_force_host_platform_device_count=8")


def _known(flag: str) -> bool:
    """Whether this jaxlib has the XLA flag: it aborts on one that it does not know."""
    for path in pathlib.Path(jaxlib.__file__).parent.glob("*.so"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(flag.encode()) >= 0:
                return True
    return False


# Without fusion emitters the suite takes 0.63 of the time, because programs compile faster.
if "xla_cpu_use_fusion_emitters" not in _asked and _known("xla_cpu_use_fusion_emitters"):
    _flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(_flags).strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# XLA reads its flags once, here; commands that tests run are compiled as a user's are.
jax.devices()
os.environ["XLA_FLAGS"] = _asked
# Tests compile thousands of tiny programs: this halves the time, and changes no result they state.
jax.config.update("jax_disable_most_optimizations", True)
# `kvjax.load` would have every later program of the process written to the user's folder.
jax.config.update("jax_enable_compilation_cache", False)

# Every annotation with axis letters is checked while tests run, and never in production.
jaxtyping.install_import_hook(["kvjax", "pallas_kernels"], "typecheck.functions_only")

hypothesis.settings.register_profile("default", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=300, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    """`--peer-python` spares the full tests of peers the making of an environment."""
    parser.addoption("--peer-python", help="a Python that has what kvjax.eval.peers lists")


def pytest_configure(config):
    """`pytest -m full` runs hypothesis with more examples, unless told a profile."""
    if config.option.markexpr == "full" and not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("full")


MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Forgets compiled programs before a process has too many memory mappings.

    A program takes some twenty, and at Linux's limit of 65,530 the next compilation crashes.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 25_000:
        import cases

        cases._COMPILED.clear()
        jax.clear_caches()
