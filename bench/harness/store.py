"""The store of the benchmark: nginx serves ranges of plain files over HTTP and HTTPS.

    with RangeServer(root, state) as server:
        server.endpoint               "http://127.0.0.1:PORT"; {root}/bucket/key is at {endpoint}/bucket/key
        server.tls_endpoint           the same over TLS, with a certificate that server.ca_bundle trusts
        server.access_log             a file with the number of bytes of each answer's body, a line each

It speaks little S3. GET and HEAD of objects work, and signatures are ignored. A listing of `folder/` is answered with
the file `.listing.xml` in it, where there is one, any other with 403.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

LISTING = ".listing.xml"
_START_TIMEOUT_S = 10.0
_TRIES = 5  # a free port may be taken before nginx has it
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])  # Debian: /usr/sbin


class NoRangeServer(Exception):
    """Raised when nginx is missing or does not start. The message says what to do."""


def find_nginx() -> str:
    """Return the path of nginx. Raises NoRangeServer."""
    found = shutil.which("nginx", path=_PATH)
    if found is None:
        raise NoRangeServer("nginx is not installed (Debian: apt-get install nginx-light)")
    return found


def nginx_version() -> str:
    """Return a version such as "1.22.1". Raises NoRangeServer."""
    printed = subprocess.run([find_nginx(), "-v"], capture_output=True, text=True, check=False).stderr
    return printed.rpartition("/")[2].strip()


class RangeServer:
    """Runs nginx over `root`, a folder of buckets, from entering the block to its end."""

    def __init__(self, root: Path, state: Path, *, host: str = "127.0.0.1", command_prefix: Sequence[str] = ()) -> None:
        """Serve `root`. `state`: an empty folder for configuration, certificate and logs.

        `command_prefix`: a command that runs nginx in a network namespace, which has the address `host`.
        """
        self.endpoint = ""
        self.tls_endpoint = ""  # "" where there is no openssl to make a certificate
        self.ca_bundle = ""
        self.access_log = str(state / "access.log")
        self._root, self._state, self._host, self._command_prefix = root, state, host, command_prefix
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it. Raises NoRangeServer."""
        program = find_nginx()
        self._state.mkdir(parents=True, exist_ok=True)
        has_tls = _make_certificate(self._state, self._host)
        output = ""
        for _ in range(_TRIES):
            port, tls_port = _free_ports()
            config = self._state / "nginx.conf"
            address = (self._host, port, tls_port if has_tls else None)
            config.write_text(_config(self._root, self._state, address))
            command = [*self._command_prefix, program, "-e", "error.log", "-p", str(self._state), "-c", str(config)]
            with (self._state / "output.txt").open("wb") as written:
                # A session of its own: Ctrl-C is for the benchmark, which ends nginx in its order.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=written, stderr=written, start_new_session=True
                )
            if self._answers(port):
                self.endpoint = f"http://{self._host}:{port}"
                if has_tls:
                    self.tls_endpoint = f"https://{self._host}:{tls_port}"
                    self.ca_bundle = str(self._state / "cert.pem")
                return self
            output = (self._state / "output.txt").read_text(errors="replace").strip()
            self._end()
        raise NoRangeServer(f"nginx does not start: {output.splitlines()[-1] if output else 'it printed nothing'}")

    def __exit__(self, *_: object) -> None:
        self._end()

    def _answers(self, port: int) -> bool:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                socket.create_connection((self._host, port), timeout=1).close()
                return self._process.poll() is None  # else another program answered
            time.sleep(0.02)
        return False

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()  # the master takes its workers along
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _config(root: Path, state: Path, address: tuple[str, int, int | None]) -> str:
    """Return nginx.conf. `address`: host, port and the port for TLS, if any."""
    host, port, tls_port = address
    listen = [f"listen {host}:{port} reuseport backlog=1024;"]
    if tls_port is not None:
        listen += [
            f"listen {host}:{tls_port} ssl reuseport backlog=1024;",
            f"ssl_certificate {state}/cert.pem; ssl_certificate_key {state}/key.pem;",
            "ssl_protocols TLSv1.2 TLSv1.3; ssl_session_cache shared:tls:1m; ssl_buffer_size 16k;",
        ]
    temps = " ".join(f"{kind}_temp_path {state}/tmp-{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    return f"""
{"user root;" if os.geteuid() == 0 else ""}
daemon off;
worker_processes 2;
pid {state}/nginx.pid;
error_log {state}/error.log warn;
events {{ worker_connections 1024; }}
http {{
  log_format sent '$body_bytes_sent';
  access_log {state}/access.log sent;
  {temps} uwsgi_temp_path {state}/tmp-uwsgi; scgi_temp_path {state}/tmp-scgi;
  default_type application/octet-stream;
  sendfile on;
  sendfile_max_chunk 2m;
  tcp_nopush on;
  tcp_nodelay on;
  keepalive_timeout 300;
  keepalive_requests 100000000;
  open_file_cache max=1000 inactive=5s;  # a file that was removed keeps its memory until it is closed
  server {{
    {" ".join(listen)}
    root {root};
    location ~ ^/[^/]+/?$ {{
      if ($args ~ "prefix=([a-z0-9-]+)") {{ set $folder $1; rewrite ^/([^/]+)/?$ /$1/$folder/{LISTING} last; }}
      return 403;
    }}
    location ~ /{LISTING}$ {{ default_type application/xml; error_page 404 = @refused; }}
    location @refused {{ return 403; }}
  }}
}}
"""


def _make_certificate(state: Path, host: str) -> bool:
    """Make a self-signed certificate for that address. Returns False where there is no openssl."""
    program = shutil.which("openssl", path=_PATH)
    if program is None:
        return False
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={host}", "-addext", f"subjectAltName=IP:{host}", "-days", "30"]
    command += ["-keyout", str(state / "key.pem"), "-out", str(state / "cert.pem")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
