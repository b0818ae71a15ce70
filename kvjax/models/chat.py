"""Chat templates of foreign files, rendered in a sandbox with limits."""

import datetime
import functools
import json
import sys
import time

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvjax.errors import InputError

SECONDS = 5.0  # a template of a real model takes milliseconds
CHARACTERS = 1 << 20  # a template may add so much to what the messages hold
GROWING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"))
MARKS = range(0xE000, 0xF900)  # the private use area of Unicode


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox without the operations that make large values from small ones."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context, operator, left, right):
        numbers = all(isinstance(x, (int, float)) and abs(x) < 1 << 31 for x in (left, right))
        if operator == "**" or not numbers:
            raise jinja2.sandbox.SecurityError(f"operator {operator!r} is refused here")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj, attr, value):
        return attr not in GROWING and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj, attribute):
        raise jinja2.sandbox.SecurityError(f"attribute {attribute!r} is refused here")


def _raise(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    for name in ("center", "format", "indent", "wordwrap", "pprint", "xmlattr"):
        env.filters.pop(name)
    env.globals.pop("lipsum")
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(template)


def check(messages):
    """Raises InputError unless `messages` is a list of dicts, each with a role."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(f"a chat needs a list of at least one message, got {messages!r:.60}")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise InputError('each message of a chat is a dict with "role" and "content"')


def render(template: str, messages, **variables) -> str:
    """The text of `messages` in `template`.

    Whatever the template does wrong, a forbidden access, a loop without end or an output beyond
    the limits, raises InputError. Memory is bounded for output only.
    """
    check(messages)
    limit = CHARACTERS + 4 * sum(len(text) for text in _strings(messages))
    previous, deadline = sys.gettrace(), time.monotonic() + SECONDS
    try:
        compiled = _compiled(template)
        sys.settrace(_stopwatch(deadline))
        return _collect(compiled.generate(messages=messages, **variables), limit)
    except InputError:
        raise
    except Exception as e:  # a template can raise whatever Python can
        raise InputError(f"the chat template failed: {type(e).__name__}: {e!s:.200}") from None
    finally:
        sys.settrace(previous)


def _collect(chunks, limit: int) -> str:
    out, size = [], 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise InputError(f"the chat template wrote over {limit} characters; use another one")
        out.append(chunk)
    return "".join(out)


def _stopwatch(deadline: float):
    """A trace function that ends code running past the deadline, line by line."""

    def trace(frame, event, argument):
        if time.monotonic() > deadline:
            raise InputError(f"the chat template ran for over {SECONDS:g} s; use another one")
        return trace

    return trace


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def shield(messages, control, pattern) -> tuple[list, str]:
    """Breaks every control token inside the messages by a mark; returns them and the mark.

    A text that only begins or ends with a part of one is marked there too, for its neighbour in
    the template may complete it. The caller removes the mark after it has found the control
    tokens that the template itself wrote.
    """
    check(messages)
    used = set().union(*map(set, _strings(messages)))
    mark = next((chr(c) for c in MARKS if chr(c) not in used), None)
    if mark is None:
        raise InputError("the messages hold every private use character; remove one of them")
    heads = {t[:n] for t in control if not t[0].isalnum() for n in range(1, len(t))}
    tails = {t[n:] for t in control if not t[-1].isalnum() for n in range(1, len(t))}
    longest = max(map(len, control), default=0)

    def fix(text):
        text = pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text) if control else text
        sizes = range(1, min(longest, len(text) + 1))
        after = mark if any(text[-n:] in heads for n in sizes) else ""
        before = mark if any(text[:n] in tails for n in sizes) else ""
        return before + text + after

    def walk(value):
        if isinstance(value, str):
            return fix(value)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, (list, tuple)) else value

    return [walk(message) for message in messages], mark
