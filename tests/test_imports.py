"""The public names, and which module may import which: architecture, sections 0 and 2."""

import ast
from pathlib import Path

import pytest

import kvjax

ROOT = Path(__file__).parents[1]
PUBLIC = """
absorb_long abstract_cache append cache_specs compress condense decode edit extend fork generate
init_cache insert join load load_cache look nbytes prefill recipe recipes reset save_cache select
split_floats step truncate
Cache CacheRecipe Generation InputError Model ModelConfig Rules Tokens
NAN OVERFLOW RULES TRIMMED UNDERFLOW
""".split()

# From the outside in. A module imports from its own line and from lines below it, no other.
LAYERS = [
    ("__main__", "cli"),
    ("commands", "compare", "demo"),
    ("generate",),
    ("calibrate", "parallel", "reuse"),
    ("api", "checkpoint", "decode", "tables"),
    ("finch", "observing"),
    ("repeating",),
    ("model",),
    ("inputs",),
    ("cache", "data", "leaf_file", "lines", "models", "sampling", "sharding"),
    ("budgets", "codecs", "reducers", "scorers"),
    ("evidence",),
    ("attention", "layers", "params"),
    ("config", "errors", "shapes", "struct"),
]
METHODS = ("budgets", "codecs", "scorers", "selectors", "reducers")
UPWARD = {  # pure functions of arrays, which budgets share with condense
    ("kvjax.budgets.best", "kvjax.cache.select"),
}


def modules(folder, name):
    """(module, file) of a package, whose files lie in `folder`."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT / folder).with_suffix("").parts
        yield ".".join((name, *parts)).removesuffix(".__init__"), file


PACKAGES = {"kvjax": "kvjax", "train": "kvjax.train", "eval": "kvjax.eval"}
EVERY = {m: f for folder, name in PACKAGES.items() for m, f in modules(folder, name)}
KERNELS = dict(modules("pallas_kernels", "pallas_kernels"))


def imported(file):
    """The modules that a file imports anywhere in it; `from a import b` is a.b if that is one."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in EVERY else node.module


def layer(module):
    name = module.split(".")[1]
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"{module} is in no layer: add it to LAYERS"
    return found[0]


def inner(module):
    """Whether a module is of the library proper."""
    return module.startswith("kvjax.") and module.split(".")[1] not in ("train", "eval")


def test_public_names_are_exactly_these():
    assert sorted(kvjax.__all__) == sorted(PUBLIC)
    assert all(hasattr(kvjax, name) for name in PUBLIC)
    tree = ast.parse((ROOT / "kvjax/__init__.py").read_text("utf-8"))
    named = [a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert sorted(named) == sorted(PUBLIC)  # nothing is imported there that is not exported


@pytest.mark.parametrize("module", [m for m in EVERY if inner(m)])
def test_library_imports_go_one_way(module):
    for other in imported(EVERY[module]):
        top = other.split(".")[0]
        assert top not in ("torch", "transformers"), f"{module} imports {other}"
        if other.startswith(("kvjax.train", "kvjax.eval")):
            assert module == "kvjax.cli", f"{module} imports {other}"
        elif other == "kvjax":
            assert layer(module) <= 1, f"{module} imports the whole package"
        elif top == "kvjax" and (module, other) not in UPWARD:
            assert layer(other) >= layer(module), f"{module} imports {other}, which is above it"
        elif top == "pallas_kernels":
            assert module.split(".")[1] in ("attention", "codecs", "selectors"), module


def test_the_model_knows_no_method():
    """Its direct imports only: what a cache holds is the cache's affair."""
    named = {name.split(".")[1] for name in imported(EVERY["kvjax.model"]) if "kvjax" in name}
    assert named and not named & set(METHODS)


def test_methods_do_not_know_each_other():
    for module, file in EVERY.items():
        folder = module.split(".")[1:2]
        if folder and folder[0] in METHODS:
            others = {n.split(".")[1] for n in imported(file) if n.startswith("kvjax.")}
            assert not others & (set(METHODS) - set(folder)), module


def test_kernels_import_nothing_of_the_library():
    assert KERNELS
    for module, file in KERNELS.items():
        assert not [n for n in imported(file) if n.split(".")[0] == "kvjax"], module


def test_train_and_eval_are_imported_by_their_installed_names():
    for module, file in EVERY.items():
        assert not {n.split(".")[0] for n in imported(file)} & {"train", "eval"}, module
        if module.startswith("kvjax.train"):
            assert not [n for n in imported(file) if n.startswith("kvjax.eval")], module
