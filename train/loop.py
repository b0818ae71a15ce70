"""One trainer: a loss, parameters of which some may be frozen, batches by step, and a folder."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvjax import struct
from kvjax.errors import InputError, unknown
from kvjax.train import record  # pyright: ignore[reportMissingImports]

SHOWN_AFTER_S = 2.0  # a run that takes less shows no progress
KNOWN = {"schedule": ("constant", "cosine", "linear", "halving"), "optimizer": ("adam", "adamw")}


@dataclass(frozen=True)
class TrainConfig:
    """What decides a run, given its loss, parameters and batches."""

    steps: int  # updates in all
    learning_rate: float = 1e-3  # the highest
    warmup: int = 0  # steps over which it rises to that
    schedule: str = "constant"  # or "cosine", "linear": down to zero; "halving": in each quarter
    optimizer: str = "adam"  # or "adamw"
    weight_decay: float = 0.0  # of adamw, on all that is trained
    clip: float | None = None  # longest gradient, by the norm over all that is trained
    seed: int = 0  # of the keys that the loss is given
    log_every: int = 10  # steps between two lines of the log
    save_every: int = 1000  # steps between two checkpoints

    def __post_init__(self):
        for name, least in (("steps", 1), ("warmup", 0), ("log_every", 1), ("save_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value}; give a whole number, {least} or more")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; give a finite number above 0")
        for name, known in KNOWN.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.warmup >= self.steps:
            raise InputError(f"warmup is {self.warmup} of {self.steps} steps; give fewer")
        if self.weight_decay and not (self.optimizer == "adamw" and 0 < self.weight_decay < 1e9):
            raise InputError(f"weight_decay is {self.weight_decay}; give 0, or more to 'adamw'")


@dataclass(frozen=True)
class Trained:
    """What a run gives."""

    params: Any  # like those given; frozen leaves are the same arrays
    step: int  # updates done
    history: list[dict]  # the step lines of the log


class TrainingStopped(InputError):
    """A loss or gradient was no number; `trained` is the state before it."""

    trained: Trained


@struct.dataclass
class State(struct.Record):
    """What an update changes."""

    params: Any  # {path: trained leaf}
    optimizer: optax.OptState
    step: jax.Array  # [] int32, updates done


def learning_rates(config: TrainConfig) -> optax.Schedule:
    """The learning rate of an update by its index from 0: a rise, then the schedule."""
    peak, rise, rest = config.learning_rate, config.warmup, config.steps - config.warmup
    after = optax.schedules.linear_schedule(peak, peak * (config.schedule != "linear"), rest)
    if config.schedule == "cosine":
        after = optax.schedules.cosine_decay_schedule(peak, rest)
    if config.schedule == "halving":
        after = optax.schedules.exponential_decay(peak, -(-rest // 4), 0.5, staircase=True)
    before = optax.schedules.linear_schedule(peak / (rise + 1), peak, max(rise, 1))
    return optax.schedules.join_schedules([before, after], [rise])


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optax transformation of a config."""
    rates, decay = learning_rates(config), config.weight_decay
    rule = optax.adamw(rates, weight_decay=decay) if decay else optax.adam(rates)
    clip = () if config.clip is None else (optax.clip_by_global_norm(config.clip),)
    return optax.chain(*clip, rule)


def split(params, frozen=None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trained leaves, frozen leaves) by path.

    frozen: a predicate on the path, or a tree of bools like params. Leaves that are not floats, or
    are empty, are frozen in any case.
    """
    leaves = record.named(params)
    if frozen is None or callable(frozen):
        still = {name: frozen is not None and bool(frozen(name)) for name in leaves}
    else:
        still = record.named(frozen)
        for name in still.keys() ^ leaves.keys():
            raise InputError(f"only one of params and frozen has {name!r}; give a bool for each")
    for name, x in leaves.items():
        floats = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        still[name] = bool(still[name]) or not floats or not jnp.size(x)
    trained = {n: x for n, x in leaves.items() if not still[n]}
    if not trained:
        raise InputError(f"all {len(leaves)} parameters are frozen; leave one to train")
    return trained, {n: x for n, x in leaves.items() if still[n]}


def _updater(loss, params, config: TrainConfig):
    """(state, frozen, batch) -> (state, what is seen of the step); no update if no number."""
    rates, transform, seed = learning_rates(config), optimizer(config), config.seed

    def scalars(trained, frozen, batch, key):
        found = loss(record.joined(params, trained | frozen), batch, key)
        value, metrics = found if isinstance(found, tuple) else (found, {})
        for name, x in {"the loss": value, **metrics}.items():
            if jnp.shape(x):
                raise InputError(f"{name} is {record.described(x)}; give a scalar, such as a mean")
        return jnp.asarray(value, jnp.float32), metrics

    def update(state, frozen, batch):
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        graded = jax.value_and_grad(scalars, has_aux=True)
        (value, metrics), grads = graded(state.params, frozen, batch, key)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        changes, moments = transform.update(grads, state.optimizer, state.params)
        new = State(optax.apply_updates(state.params, changes), moments, state.step + 1)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        seen = {"loss": value, "metrics": metrics, "grad_norm": norm,
                "learning_rate": jnp.float32(rates(state.step)), "finite": finite}  # fmt: skip
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), seen

    return jax.jit(update, donate_argnums=0)


def train(
    loss: Callable, params, batches, config: TrainConfig, *, frozen=None,
    out: str | os.PathLike[str] | None = None, resume: bool = True,
    evaluate: Callable[[Any], Any] | None = None,
    on_step: Callable[[int, Any], Any] | None = None, progress: bool = True,
) -> Trained:  # fmt: skip
    """Trains `params` to a lower `loss(params, batch, key) -> scalar or (scalar, {name: scalar})`.

    batches: step -> batch, by the index from 0; always the same one for a step, all of one shape.
    frozen: as in `split`. out: folder of log, checkpoints and loss curve; a run that ended early
    goes on where it was saved last, to the same bits. evaluate: params -> a number, lower is
    better, at each checkpoint. on_step: told the updates done and the params, which hold until the
    next step. A loss or gradient that is no number raises TrainingStopped, before its update.
    """
    if not callable(batches):
        raise InputError(f"batches is a {type(batches).__name__}; give a function of the step")
    trained, rest = split(params, frozen)
    trained = {n: jnp.array(x, jnp.result_type(x), copy=True) for n, x in trained.items()}
    with contextlib.ExitStack() as stack:
        opened = record.opened(out, config, trained, rest, resume=resume, best=evaluate is not None)
        folder = stack.enter_context(opened)
        trained, moments = folder.restored(trained, optimizer(config).init(trained))
        state = State(trained, moments, jnp.int32(folder.step))
        if folder.step < config.steps:
            tick = stack.enter_context(_bar(folder.step, config.steps, progress))
            asked = stack.enter_context(_interrupts())
            run = _Run(config, params, folder, evaluate, on_step)
            rest, update = jax.tree.map(jnp.asarray, rest), _updater(loss, params, config)
            state = run.all(update, state, rest, batches, tick, asked)
            if folder.path is not None and len(folder.history) > 1:
                record.plot(folder.history, folder.path / record.CURVE)
        return Trained(record.joined(params, state.params), config.steps, folder.history)


@dataclass
class _Run:
    """One call of `train`: what its steps share."""

    config: TrainConfig
    params: Any  # as given: the frozen leaves, and the tree
    folder: record.Folder
    evaluate: Callable | None
    on_step: Callable | None

    def all(self, update, state: State, frozen: dict, batches, tick, asked: list) -> State:
        """Every step from where the folder stands."""
        compiled, first, spent, timed, extra = None, None, 0.0, 0, {}
        for step in range(self.folder.step, self.config.steps):
            began = time.perf_counter()
            batch = jax.tree.map(jnp.asarray, batches(step))
            if compiled is None:
                first, start = batch, time.perf_counter()
                tick(step, "compiling")
                compiled = update.lower(state, frozen, batch).compile()
                extra = {"compile_s": time.perf_counter() - start}
            _alike(step, first, batch)
            state, seen = compiled(state, frozen, batch)
            seen = jax.tree.map(float, jax.device_get(seen))
            if step > self.folder.step:  # the first step is cold
                spent, timed = spent + time.perf_counter() - began, timed + 1
            if not seen.pop("finite"):
                raise self.stopped(step, state, seen)
            seen["s_per_step"] = spent / timed if timed else None
            if self.done(step + 1, state, seen | extra):
                spent, timed, extra = 0.0, 0, {}
            tick(step + 1, f"loss {seen['loss']:.4g}")
            if asked:
                where = self.folder.save(step + 1, state.params, state.optimizer)
                raise KeyboardInterrupt(f"{where}; with out, the same call goes on")
        return state

    def done(self, step: int, state: State, seen: dict) -> bool:
        """Logs and saves what is due after `step` updates; whether a line was logged."""
        every, last = self.config, step == self.config.steps
        save, log = last or not step % every.save_every, last or not step % every.log_every
        if save and self.evaluate is not None:
            value = self.evaluate(record.joined(self.params, state.params))
            seen, log = seen | {"evaluate": float(value)}, True
        if log:
            self.folder.add({"kind": "step", "step": step} | seen)
        if save:
            self.folder.save(step, state.params, state.optimizer, seen.get("evaluate"))
        if self.on_step is not None:
            self.on_step(step, record.joined(self.params, state.params))
        return log

    def stopped(self, step: int, state: State, seen: dict) -> TrainingStopped:
        """The error for a step without a finite loss and gradient, once the state is saved."""
        reason = f"loss {seen['loss']}, gradient norm {seen['grad_norm']}"
        self.folder.add({"kind": "stopped", "step": step, "batch": step, "reason": reason} | seen)
        where = self.folder.save(step, state.params, state.optimizer)
        error = TrainingStopped(
            f"batch {step} gave {reason} at learning rate {seen['learning_rate']:.3g}; its update "
            f"was not applied and {where}; look at batches({step}), or try a lower learning_rate, "
            "a longer warmup or a smaller clip, in another folder"
        )
        error.trained = Trained(record.joined(self.params, state.params), step, self.folder.history)
        return error


def _alike(step: int, first, new) -> None:
    """Refuses a batch of another shape: one update is compiled, and padding is the caller's."""
    was, now = [{n: record.described(x) for n, x in record.named(b).items()} for b in (first, new)]
    for name in [*was, *now]:
        if was.get(name) != now.get(name):
            raise InputError(
                f"batch {step} has {name or 'an array'} = {now.get(name)} and the first one had "
                f"{was.get(name)}; pad it, or leave a smaller last batch out"
            )


@contextlib.contextmanager
def _interrupts() -> Iterator[list]:
    """A list that is no longer empty after Ctrl-C; a second Ctrl-C raises at once."""
    asked = []

    def ask(number, frame):
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _bar(start: int, total: int, progress: bool) -> Iterator[Callable[[int, str], None]]:
    """A function of (steps done, what to say): a bar on a terminal, two seconds into the run."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    silent = not progress or not console.is_terminal
    shown = Progress(*columns, console=console, disable=silent, transient=True)
    task = shown.add_task("", total=total, completed=start)
    timer = threading.Timer(SHOWN_AFTER_S, shown.start)
    timer.start()
    try:
        yield lambda step, what: shown.update(task, completed=step, description=what)
    finally:
        timer.cancel()
        timer.join()
        shown.stop()
