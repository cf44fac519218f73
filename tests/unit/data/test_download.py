"""Downloads from a local server: valid, damaged, unreachable, archives."""

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedensemble.data import get
from fedensemble.data.sources import download
from fedensemble.data.sources.download import Remote
from fedensemble.errors import DataError, InputError


@pytest.fixture
def server(monkeypatch):
    """The address of a server, its files, and the paths that were requested."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # takes precedence over NO_PROXY
    files, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            content = files.get(self.path.strip("/"))
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", files, asked
        running.shutdown()
        thread.join()


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def archive(members):
    """Returns a .tar.gz with these files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def leftovers(root):
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.fixture
def plain(server, monkeypatch):
    """Replaces the downloads of MNIST by one small file."""
    address, files, _ = server
    files["a.gz"] = b"the content"
    monkeypatch.setitem(
        download.REMOTES, "mnist", (Remote(f"{address}/a.gz", md5(b"the content"), "mnist"),)
    )
    return files


@pytest.fixture
def packed(server, monkeypatch):
    """Replaces the download of CIFAR-10 by an archive of two small files."""
    address, files, _ = server
    files["c.tar.gz"] = archive({"cifar/x.bin": b"12", "cifar/y.bin": b"3", "cifar/readme": b"?"})
    remote = Remote(
        f"{address}/c.tar.gz", md5(files["c.tar.gz"]), "cifar", {"x.bin": 2, "y.bin": 1}
    )
    monkeypatch.setitem(download.REMOTES, "cifar10", (remote,))
    return files


def test_downloads_once(tmp_path, plain, server):
    messages = []
    assert get("mnist", tmp_path, messages.append) == [tmp_path / "mnist" / "a.gz"]
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == b"the content"
    assert len(messages) == 1
    assert "a.gz" in messages[0]
    get("mnist", tmp_path, messages.append)
    assert server[2] == ["/a.gz"]
    assert len(messages) == 1


def test_replaces_a_damaged_file(tmp_path, plain):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "a.gz").write_bytes(b"the con")
    get("mnist", tmp_path)
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == b"the content"


@pytest.mark.parametrize("content", [b"something else", None])
def test_wrong_content_leaves_nothing(tmp_path, plain, content):
    plain["a.gz"] = content
    with pytest.raises(
        DataError, match=r"Could not get http://127.*a\.gz for dataset 'mnist'.*by hand.*/mnist"
    ) as caught:
        get("mnist", tmp_path)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


def test_unreachable(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # takes precedence over NO_PROXY
    monkeypatch.setitem(
        download.REMOTES, "mnist", (Remote("http://127.0.0.1:9/a.gz", md5(b""), "mnist"),)
    )
    with pytest.raises(DataError, match=r"Could not get http://127\.0\.0\.1:9/a\.gz.*by hand"):
        get("mnist", tmp_path)
    assert leftovers(tmp_path) == []


def test_folder_that_cannot_be_made(tmp_path, plain, packed):
    (tmp_path / "file").write_bytes(b"")
    for name in ("mnist", "cifar10"):
        with pytest.raises(DataError, match="Could not get"):
            get(name, tmp_path / "file")


def test_unpacks_once(tmp_path, packed, server):
    expected = [tmp_path / "cifar" / "x.bin", tmp_path / "cifar" / "y.bin"]
    assert get("cifar10", tmp_path) == expected
    assert expected[0].read_bytes() == b"12"
    assert get("cifar10", tmp_path) == expected
    assert server[2] == ["/c.tar.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar"]


def test_replaces_an_incomplete_folder(tmp_path, packed):
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "x.bin").write_bytes(b"1")
    get("cifar10", tmp_path)
    assert (tmp_path / "cifar" / "x.bin").read_bytes() == b"12"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (archive({"cifar/x.bin": b"12"}), "does not contain all of x.bin, y.bin"),
        (archive({"../escaped": b"1", "cifar/x.bin": b"12", "cifar/y.bin": b"3"}), "outside"),
        (b"no archive", "Could not get"),
    ],
)
def test_bad_archive_leaves_nothing(tmp_path, packed, server, monkeypatch, content, problem):
    packed["c.tar.gz"] = content
    remote = Remote(f"{server[0]}/c.tar.gz", md5(content), "cifar", {"x.bin": 2, "y.bin": 1})
    monkeypatch.setitem(download.REMOTES, "cifar10", (remote,))
    with pytest.raises(DataError, match=problem):
        get("cifar10", tmp_path / "root")
    assert leftovers(tmp_path) == []


def test_datasets_without_download(tmp_path):
    assert get("sine", tmp_path) == []
    with pytest.raises(DataError, match="fedscale"):
        get("openimage", tmp_path)
    with pytest.raises(DataError, match=r"numpy\.savez"):
        get("npz", tmp_path)
    with pytest.raises(InputError, match="did you mean 'mnist'"):
        get("mnits", tmp_path)


def test_table_is_well_formed():
    for remotes in download.REMOTES.values():
        for remote in remotes:
            kind, digest = remote.known_hash.split(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[kind]
            assert remote.url.startswith("https://")
