"""A real S3 server on the loopback: moto's, in a thread of this process."""

from __future__ import annotations

import contextlib
import logging
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
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        try:
            yield "s3://bucket"
        finally:
            server.stop()
