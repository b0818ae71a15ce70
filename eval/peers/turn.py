"""One turn of a measurement: `python turn.py job.json`, run by the Python that has the engine.

Every engine is measured by this file, which needs the standard library only. It prints lines of
JSON: {"doing": ...} as it goes on, and {"result": ...} or {"error": ...} at last.

An engine has `prefill(ids, room, recipe)` and `fork(state)`, `decode(state, steps)`, which return
when the work is done, `sizes(state)`, `machine()`, and `versions`.
"""

import importlib
import json
import os
import resource
import sys
import time

STEPS = 16  # tokens of a timed run
RUNS = 3  # timed runs on one cache, after one that warms up
ROUNDS = 2  # fresh copies of the cache
ROOM = (RUNS + 1) * STEPS  # tokens that a cache has room for after its context
PREFILLS = 4  # of which the first may compile


def main(path):
    """Runs the job in the file `path` and prints what it gives."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    os.sched_setaffinity(0, job["cores"])  # before an engine counts them
    try:
        engine = importlib.import_module(job["engine"]).Engine(job)
        say(result=TASKS[job["task"]](engine, job) | {"versions": engine.versions})
    except Exception as error:
        say(error=str(error) or type(error).__name__)
        raise


def say(**line):
    print(json.dumps(line), flush=True)


def speed(engine, job):
    """Decoding at every context, and prefill of `job["prefill"]` tokens with every recipe."""
    rows = []
    for context in job["contexts"]:
        say(doing=f"reading {context:,} tokens")
        states = {r: engine.prefill(job["ids"][:context], ROOM, r) for r in _recipes(job, context)}
        say(doing=f"decoding at {context:,} tokens")
        made = {recipe: {"ms": [], "tokens": []} for recipe in states}
        for _ in range(ROUNDS):
            for recipe, state in states.items():
                _decode(engine, engine.fork(state), made[recipe])
        for recipe, state in states.items():
            rows.append({"context": context, "recipe": recipe} | made[recipe] | engine.sizes(state))
        del states
    prefills = {recipe: [] for recipe in job["recipes"]}
    for i in range(PREFILLS):
        say(doing=f"reading {job['prefill']:,} tokens, {i + 1} of {PREFILLS}")
        for recipe, times in prefills.items():
            started = time.perf_counter()
            engine.prefill(job["ids"][: job["prefill"]], ROOM, recipe)
            times.append(time.perf_counter() - started)
    return {"decode": rows, "prefill": {"tokens": job["prefill"], "s": {
        recipe: times[1:] for recipe, times in prefills.items()}}}  # fmt: skip


def _recipes(job, context):
    """Of kvjax, recipes other than the exact cache decode too, at the longest context."""
    longest = job["engine"] == "kvjax_speed" and context == max(job["contexts"])
    return job["recipes"] if longest else job["recipes"][:1]


def _decode(engine, state, made):
    """Adds milliseconds per token of each run, and the tokens of all runs."""
    state, tokens = engine.decode(state, STEPS)
    for _ in range(RUNS):
        started = time.perf_counter()
        state, more = engine.decode(state, STEPS)
        made["ms"].append(1000 * (time.perf_counter() - started) / STEPS)
        tokens += more
    made["tokens"] = tokens


def memory(engine, job):
    """Peak memory of a process that loads, reads `job["prefill"]` tokens and decodes 64."""
    say(doing=f"reading {job['prefill']:,} tokens, decoding {ROOM}")
    state = engine.prefill(job["ids"][: job["prefill"]], ROOM, "exact")
    for _ in range(ROOM // STEPS):
        state, _ = engine.decode(state, STEPS)
    return {"maxrss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def machine(engine, job):
    """Bytes and float operations a second that this machine reaches."""
    say(doing="measuring the machine")
    return engine.machine()


TASKS = {"speed": speed, "memory": memory, "machine": machine}

if __name__ == "__main__":
    main(sys.argv[1])
