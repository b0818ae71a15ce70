"""What a training run leaves in its folder: a log of JSON lines, checkpoints, a loss curve."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import operator
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from kvjax.errors import InputError
from kvjax.lines import append

LOG, SAVED, CURVE = "log.jsonl", "checkpoints", "loss.png"
FORMAT = 1


def named(tree) -> dict[str, Any]:
    """The leaves of a tree by their path, such as "blocks.0.q", in the order of the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in found:
            raise InputError(f"two parameters are called {name!r}; use keys without dots")
        found[name] = leaf
    return found


def joined(params, leaves: dict[str, Any]):
    """`params` with these leaves, by path, in place of its own."""
    own = named(params)
    return jax.tree.structure(params).unflatten([leaves.get(n, own[n]) for n in own])


def described(leaf) -> str:
    """Type and shape, such as "float32[2,3]"."""
    return f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]"


def head(config, trained: dict, frozen: dict) -> dict:
    """The first line of a log: what runs, with what, where."""
    return {
        "kind": "run",
        "format": FORMAT,
        "step": 0,
        "config": dataclasses.asdict(config),
        "parameters": {n: described(x) for n, x in trained.items()}
        | {n: f"frozen {described(x)} sha256 {_digest(x)}" for n, x in frozen.items()},
        "versions": {n: importlib.metadata.version(n) for n in ("kvjax", "jax", "optax")},
        "command": shlex.join(sys.orig_argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{jax.default_backend()}, {jax.devices()[0].device_kind}",
    }


def _digest(leaf) -> str:
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()[:12]


class Folder:
    """The log and the checkpoints of a run; the log in memory alone where there is no folder."""

    def __init__(self, path: Path | None, best: bool = False):
        self.path, self.best, self.step, self.history = path, best, 0, []
        self._stream: Any = None
        self._manager: Any = None

    def add(self, line: dict) -> None:
        """Appends a line, all or nothing of it; what is not finite is written as null."""
        line = _finite(line)
        data = (json.dumps(line, separators=(",", ":"), default=float) + "\n").encode()
        if line["kind"] == "step":
            self.history.append(line)
        if self._stream is None:
            return
        try:
            append(self._stream, data)
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; make room, and the same call goes on"
            ) from error

    def save(self, step: int, params, optimizer, value: float | None = None) -> str:
        """Saves the state after `step` updates, if it is not there; where it is, in words."""
        if self._manager is None:
            return "nothing was saved, as there is no folder: give out="
        if step not in self._manager.all_steps():
            os.fsync(self._stream)
            args = ocp.args.Composite(
                params=ocp.args.StandardSave(params), optimizer=ocp.args.StandardSave(optimizer)
            )
            value = math.inf if value is None or not math.isfinite(value) else value
            metrics = {"evaluate": value} if self.best else None
            self._manager.save(step, args=args, metrics=metrics, force=True)
        return f"the state after {step} updates is saved in {self.path}/{SAVED}/{step}"

    def restored(self, params, optimizer):
        """(params, optimizer) as they were saved last, or as given if they never were."""
        if self._manager is None or self._manager.latest_step() is None:
            return params, optimizer
        like = {"params": params, "optimizer": optimizer}
        found = _read(self._manager, self.step, like)
        return found["params"], found["optimizer"]


def _finite(x) -> Any:
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


@contextlib.contextmanager
def opened(
    out: str | os.PathLike[str] | None, config, trained: dict, frozen: dict, *, resume: bool,
    best: bool,
) -> Iterator[Folder]:  # fmt: skip
    """The folder of a run, new or resumed; locked until the end, as two runs would tear it."""
    folder = Folder(None if out is None else Path(out).absolute(), best)
    if folder.path is None:
        yield folder
        return
    with contextlib.ExitStack() as stack:
        folder._stream = _locked(folder.path, resume)
        stack.callback(os.close, folder._stream)
        lines = parse(folder.path / LOG)
        folder._manager = stack.enter_context(_manager(folder.path, best))
        folder.step = folder._manager.latest_step() or 0
        new = head(config, trained, frozen)
        if lines or folder._manager.all_steps():
            _same(folder.path, lines[0][0] if lines else {}, new)
        kept = [(x, end) for x, end in lines if x["step"] <= folder.step]
        os.ftruncate(folder._stream, kept[-1][1] if kept else 0)  # torn, or to be done again
        folder.history = [x for x, _ in kept if x["kind"] == "step"]
        if not kept or folder.step < config.steps:
            folder.add(new | {"step": folder.step})
        yield folder


def _locked(path: Path, resume: bool) -> int:
    """The log, open to append to and locked."""
    import fcntl

    try:
        path.mkdir(parents=True, exist_ok=True)
        there = sorted(x.name for x in path.iterdir() if not x.name.startswith("."))
        if there and not resume:
            raise InputError(f"{path} holds {there[0]} and resume is False; give another folder")
        if there and LOG not in there:
            raise InputError(f"{path} holds {there[0]} but no {LOG}; give another folder")
        stream = os.open(path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another folder") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(stream)
        raise InputError(
            f"another run is writing {path}; wait for it or give another folder"
        ) from None
    return stream


def _same(path: Path, old: dict, new: dict) -> None:
    """Refuses to mix two runs in one folder."""
    for part in ("config", "parameters"):
        was, now = old.get(part, {}), new[part]
        for name in [*now, *was]:
            if was.get(name) != now.get(name):
                a, b = (json.dumps(x.get(name, "(none)")) for x in (was, now))
                raise InputError(
                    f"{path} was made with {name} = {a} and this run has {b}; give another folder"
                )


def parse(log: Path) -> list[tuple[dict, int]]:
    """(line, where it ends in bytes) of a log; a torn last line is left out."""
    try:
        data = log.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {log}: {error.strerror}; give the folder of a training run"
        ) from None
    lines, end = [], 0
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(True), 1):
        end += len(text)
        try:
            line = json.loads(text)
            lines.append(({"kind": line["kind"], "step": int(line["step"])} | line, end))
        except (ValueError, TypeError, KeyError):
            shown = text[:40].decode("utf-8", "replace").strip()
            raise InputError(
                f"{log}, line {number}: expected a JSON object with kind and step, got {shown!r}; "
                "it was not written by kvjax.train"
            ) from None
    if lines and lines[0][0].get("format") != FORMAT:
        found = lines[0][0].get("format")
        raise InputError(f"{log}: expected format {FORMAT}, got {found}; give another folder")
    return lines


def _manager(path: Path, best: bool) -> ocp.CheckpointManager:
    """Keeps the last two checkpoints, and the best if they are evaluated; lower is better."""
    value = operator.itemgetter("evaluate")
    kept: list[keep.PreservationPolicy] = [keep.LatestN(2)]
    if best:
        kept.append(keep.BestN(get_metric_fn=value, reverse=True, n=1,
                               keep_checkpoints_without_metrics=False))  # fmt: skip
    options = ocp.CheckpointManagerOptions(
        preservation_policy=keep.AnyPreservationPolicy(kept), enable_async_checkpointing=False,
        best_fn=value if best else None, best_mode="min",
    )  # fmt: skip
    return ocp.CheckpointManager(path / SAVED, options=options)


def _read(manager, step: int, like: dict) -> dict:
    """The saved trees of a step, shaped and placed `like` these."""

    def abstract(x):
        x = jnp.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    parts = {n: ocp.args.StandardRestore(jax.tree.map(abstract, x)) for n, x in like.items()}
    try:
        return dict(manager.restore(step, args=ocp.args.Composite(**parts)).items())
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).splitlines()[0][:100]
        raise InputError(
            f"cannot read {manager.directory}/{step}: {reason}; remove it to use another"
        ) from None


def history(out: str | os.PathLike[str]) -> list[dict]:
    """The logged steps of a run: step, loss, metrics, grad_norm, learning_rate, s_per_step."""
    return [line for line, _ in parse(Path(out) / LOG) if line["kind"] == "step"]


def restore(out: str | os.PathLike[str], params, step: int | str = "last"):
    """`params` with what a run in `out` trained, after `step` updates, "last" or "best".

    Frozen parameters are not saved: they stay as given.
    """
    path, leaves = Path(out).absolute(), named(params)
    lines = parse(path / LOG)
    saved = lines[0][0]["parameters"] if lines else {}
    trained = {n: text for n, text in saved.items() if not text.startswith("frozen ")}
    for name, was in trained.items():
        now = described(leaves[name]) if name in leaves else "(none)"
        if was != now:
            raise InputError(f"{path} was made with {name} = {was} and params has {now}")
    with _manager(path, best=True) as manager:
        steps = manager.all_steps()
        at = {"last": manager.latest_step(), "best": manager.best_step()}.get(str(step), step)
        if at not in steps:
            raise InputError(f"{path} has no checkpoint {step!r}; it has {sorted(steps)}")
        found = _read(manager, int(at), {"params": {n: leaves[n] for n in trained}})["params"]
    return joined(params, found)


def plot(lines: list[dict], path: str | os.PathLike[str] | None = None):
    """A matplotlib figure of the loss, also written to `path`; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([x["step"] for x in lines], [x["loss"] for x in lines], label="loss")
    tried = [x for x in lines if x.get("evaluate") is not None]
    if tried:
        axes.plot([x["step"] for x in tried], [x["evaluate"] for x in tried], label="evaluate")
        axes.legend()
    axes.set(xlabel="updates", ylabel="loss")
    if all(x["loss"] > 0 for x in lines):
        axes.set_yscale("log")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
