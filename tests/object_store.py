"""A real S3 server on the loopback: moto's, in a thread of this process.

python -m tests.object_store serves until its stdin ends, and prints the variables by which it is found.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

_VARIABLES = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[str | None]:
    """A server with one bucket, which this process and its children find by their environment; yields its URL.

    None where moto or s3fs isn't installed.
    """
    try:
        import moto.server as moto
        import s3fs
    except ImportError:
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_VARIABLES, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        with contextlib.suppress(FileExistsError):  # moto keeps what an earlier server of this process had
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        try:
            yield "s3://bucket"
        finally:
            server.stop()


@contextlib.contextmanager
def s3_server_apart() -> Iterator[str]:
    """As `s3_server`, in a process of its own: for a process that forks."""
    command = [sys.executable, "-m", "tests.object_store"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        os.environ.update(json.loads(server.stdout.readline()))
        yield "s3://bucket"
    finally:
        server.stdin.close()
        server.wait()


if __name__ == "__main__":
    with s3_server() as url:
        names = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        print(json.dumps(names), flush=True)  # noqa: T201
        sys.stdin.read()
