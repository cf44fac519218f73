"""The report that `fedensemble watch` serves: it follows the run, and nobody else may read it."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedensemble.cli.commands.watch import watch
from fedensemble.errors import InputError
from fedensemble.report.html import page as html_page
from fedensemble.report.html import write_page
from fedensemble.report.live import server as live
from fedensemble.report.live.server import LiveServer

TEN_SECONDS = 10
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("CHROMIUM") or next(
    (found for name in NAMES if (found := shutil.which(name))), None
)


@contextmanager
def serving(folder):
    with LiveServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", **headers):
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], TEN_SECONDS)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


class Events:
    """The stream of events, as a browser reads it."""

    def __init__(self, server, seen="", **headers):
        self.connection = http.client.HTTPConnection(
            "127.0.0.1", server.server_address[1], timeout=TEN_SECONDS
        )
        self.connection.request("GET", f"/events?seen={seen}", headers=headers)
        self.answer = self.connection.getresponse()

    def next(self):
        """The id of the next event."""
        lines = []
        while True:
            line = self.answer.readline().decode().rstrip("\n")
            if not line and "event: update" in lines:
                return next(text for text in lines if text.startswith("id: ")).removeprefix("id: ")
            lines.append(line)
            assert len(lines) < 100

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.answer.close()
        self.connection.close()


def version_of(text):
    return re.search(r'<body data-version="(\w+)">', text)[1]


def add_round(folder):
    """Appends one record, as training does."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    record["round"] += 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record["round"]


def contents(folder):
    """Names, bytes and times of all files below a folder."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture
def unfinished(make_run, tmp_path):
    return make_run(root=tmp_path, done=False, rounds=12)


def test_the_page_is_the_report_and_the_folder_is_not_touched(unfinished):
    before = contents(unfinished)
    with serving(unfinished) as server:
        status, headers, text = ask(server)
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        assert "Not finished: 12 of 30 rounds." in text and text.count("<svg") > 3
        with Events(server) as events:
            assert events.next() == version_of(text)
        assert ask(server)[2] == text
    assert contents(unfinished) == before
    # Apart from what makes it live, it is the page that `fedensemble report` writes.
    static = write_page(unfinished).read_text()
    live_parts = r' data-version="\w+"|<p id="live".*?</p>\n|<script>\n"use strict";\n// A report that is served.*?</script>\n'
    assert re.sub(live_parts, "", text, flags=re.DOTALL) == static


def test_new_rounds_are_announced_and_shown(unfinished, monkeypatch):
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)
    with serving(unfinished) as server:
        seen = version_of(ask(server)[2])
        with Events(server, seen) as events:
            for _ in range(2):
                rounds = add_round(unfinished)
                seen = events.next()
                text = ask(server)[2]
                assert version_of(text) == seen
                assert f"Not finished: {rounds} of 30 rounds." in text


def test_a_browser_that_comes_back_is_told_what_it_missed(unfinished):
    with serving(unfinished) as server:
        seen = version_of(ask(server)[2])
        add_round(unfinished)
        with Events(server, seen) as events:  # the page was loaded before
            newest = events.next()
        assert newest != seen
        # A browser that reconnects sends the id of the last event, and the old address.
        add_round(unfinished)
        with Events(server, seen, **{"Last-Event-ID": newest}) as events:
            assert events.next() not in (seen, newest)


def test_a_run_that_has_not_begun_that_ends_and_that_is_deleted(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)
    folder = tmp_path / "made-0"
    with serving(folder) as server, Events(server) as events:
        events.next()
        assert "There is no run in this folder" in ask(server)[2]
        folder.mkdir()
        made = make_run(root=tmp_path / "elsewhere", done=False, rounds=1, test=False)
        shutil.copy(made / "config.toml", folder)
        events.next()
        assert "has no finished round yet" in ask(server)[2]
        shutil.copy(made / "metrics.jsonl", folder)
        events.next()
        assert "Not finished: 1 of 30 rounds." in ask(server)[2]
        finished = make_run(root=tmp_path / "finished", rounds=30)
        for file in sorted(finished.iterdir()):
            shutil.copy(file, folder)
        time.sleep(0.1)
        text = ask(server)[2]
        assert "Not finished" not in text
        assert "Calibration diagram" in text
        shutil.rmtree(folder)
        time.sleep(0.1)
        status, _, text = ask(server)
        assert status == 200 and "There is no run in this folder" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b"{}\n"),
        ("config.toml", b"\xff"),
        ("summary.json", b"[]"),
        ("clients.json", b"{"),
    ],
)
def test_a_damaged_file_is_a_message_and_the_page_goes_on(name, content, unfinished):
    with serving(unfinished) as server:
        before = (unfinished / name).read_bytes() if (unfinished / name).exists() else None
        (unfinished / name).write_bytes(content)
        status, _, text = ask(server)
        assert status == 200 and 'class="warning"' in text and str(unfinished.name) in text
        assert "Traceback" not in text
        if before is not None:
            (unfinished / name).write_bytes(before)
            assert "Not finished: 12 of 30 rounds." in ask(server)[2]


def test_a_line_that_is_being_written_is_left_out(unfinished):
    with serving(unfinished) as server, (unfinished / "metrics.jsonl").open("a") as file:
        file.write('{"round": 13, "lo')
        file.flush()
        assert "Not finished: 12 of 30 rounds." in ask(server)[2]


def test_names_from_files_are_escaped(unfinished):
    config = (unfinished / "config.toml").read_text()
    (unfinished / "config.toml").write_text(config.replace('name = "made"', 'name = "<img src=x>"'))
    with serving(unfinished) as server:
        assert "<img" not in ask(server)[2]


# Who may read it


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:9999", "127.0.0.1:80", "[::1]:5"]
)
def test_requests_for_this_machine_are_answered_also_through_a_tunnel(host, unfinished):
    with serving(unfinished) as server:
        assert ask(server, Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "0.0.0.0", "127.0.0.1@evil.example", "[::2]"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/events"])
def test_requests_for_other_hosts_are_refused(host, path, unfinished):
    """A page of evil.example whose name resolves to 127.0.0.1 sends that name as Host."""
    with serving(unfinished) as server:
        status, _, text = ask(server, path, Host=host)
        assert status == 403 and "made" not in text and "<" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/metrics.jsonl",
        "/config.toml",
        "/../config.toml",
        "/%2e%2e/x",
        "/checkpoint",
        "/events/",
    ],
)
def test_nothing_else_is_served(path, unfinished):
    with serving(unfinished) as server:
        assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_requests_that_change_something_are_refused(method, unfinished):
    with serving(unfinished) as server:
        assert ask(server, method=method)[0] == 501


def test_other_sites_cannot_embed_or_load_it(unfinished):
    with serving(unfinished) as server:
        _, headers, _ = ask(server)
    assert "Access-Control-Allow-Origin" not in headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_it_listens_on_loopback_only(unfinished):
    with serving(unfinished) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


def test_streams_are_limited_and_freed(unfinished, monkeypatch):
    monkeypatch.setattr(live, "MAX_STREAMS", 2)
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(live, "PING_SECONDS", 0.0)
    with serving(unfinished) as server:
        with Events(server), Events(server):
            assert ask(server, "/events")[0] == 503
        deadline = time.monotonic() + TEN_SECONDS
        while not server.streams.acquire(blocking=False):  # a ping finds that the browser has gone
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_many_viewers_get_one_page_that_is_made_once(unfinished, monkeypatch):
    made, original = [], html_page.run_page
    from fedensemble.report.live import live_page

    def counted(folder, version):
        made.append(version)
        return original(folder, version)

    monkeypatch.setattr(live_page, "run_page", counted)
    with serving(unfinished) as server:
        texts = []
        threads = [threading.Thread(target=lambda: texts.append(ask(server)[2])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1 and len(texts) == 8 and len(set(texts)) == 1


def test_a_connection_that_breaks_prints_nothing(unfinished, capfd):
    with serving(unfinished) as server:
        for text in (
            b"GET / HT",
            b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\x16\x03\x01\n\n",
        ):
            with socket.create_connection(server.server_address) as connection:
                connection.sendall(text)
        ask(server)
        add_round(unfinished)
        time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


# The command


def test_a_port_that_is_taken_is_named(unfinished):
    with serving(unfinished) as server, pytest.raises(InputError, match="Give another --port"):
        LiveServer(unfinished, server.server_address[1])


def test_other_paths_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        watch(tmp_path / "file", 0, False)
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "table.csv").write_text("")
    with pytest.raises(InputError, match="Watch one of its runs"):
        watch(tmp_path / "comparison", 0, False)
    with pytest.raises(InputError, match="neither a run"):
        watch(tmp_path, 0, False)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_command_follows_a_run_of_another_process_and_can_be_stopped(end, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
    }

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-m", "fedensemble", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A job in the background of a script, as in CI, ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    with start("watch", "run") as viewer:
        first = viewer.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", first)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/events")
        answer = connection.getresponse()

        def see_update():
            while not answer.readline().startswith(b"event: update"):
                pass

        see_update()  # the empty folder
        with start("run", "--out", "run", "--set", "rounds=3") as training:
            assert training.wait(60) == 0
        see_update()  # however few looks a run of a second gets, one comes after it
        with start("run", "run", "--set", "rounds=30") as training:
            see_update()
            viewer.send_signal(end)
            output = training.stdout.read()
            assert training.wait(60) == 0 and "Report: run/report.html" in output
        assert viewer.wait(TEN_SECONDS) == (0 if end == signal.SIGINT else -signal.SIGKILL)
        assert "Traceback" not in viewer.stdout.read()


# The browser reads commands from file descriptor 3, and writes answers to 4.
START_BROWSER = """import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execvp(sys.argv[3], sys.argv[3:])"""


class Browser:
    """A page in Chromium, controlled by the DevTools protocol over two pipes."""

    def __init__(self, url, profile):
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", START_BROWSER, str(commands), str(answers), BROWSER,
                "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self.received, self.count, self.session = b"", 0, {}
        target = self.send("Target.createTarget", url=url)["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def send(self, method, **params):
        """The answer to a command."""
        self.count += 1
        command = {"id": self.count, "method": method, "params": params, **self.session}
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            while b"\0" not in self.received:
                part = os.read(self.answers, 2**16)
                assert part, "the browser has ended"
                self.received += part
            message, self.received = self.received.split(b"\0", 1)
            answer = json.loads(message)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def wait_for(self, expression):
        """The value of a JavaScript expression as soon as it is one."""
        for _ in range(600):
            result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
            assert "exceptionDetails" not in result, result
            if value := result["result"].get("value"):
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true in the browser: {expression}")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium; set CHROMIUM to its path")
def test_a_page_that_is_open_in_a_browser_follows_the_run(unfinished, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)
    shows = "document.querySelector('main, header') && document.body.innerText.includes('{}')"
    with serving(unfinished) as server:
        browser = Browser(server.url, tmp_path / "profile")
        try:
            browser.wait_for(shows.format("Not finished: 12 of 30 rounds."))
            browser.wait_for("document.getElementById('live').textContent === 'Live'")
            opened = "document.querySelector('details').open"
            browser.wait_for(f"{opened} = true")
            for _ in range(2):
                rounds = add_round(unfinished)
                browser.wait_for(shows.format(f"Not finished: {rounds} of 30 rounds."))
            assert browser.wait_for(opened), "what the reader opened stays open"
            assert browser.wait_for("document.querySelectorAll('svg.chart .line').length") > 3
            server.stopping.set()
            server.shutdown()
            server.socket.close()
            browser.wait_for("document.getElementById('live').classList.contains('lost')")
        finally:
            browser.close()
