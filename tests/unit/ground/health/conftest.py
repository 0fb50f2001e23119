"""What tests of the heartbeat page share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import Page, make_page


@pytest.fixture
def page() -> Iterator[Page]:
    """This process's own."""
    fd = make_page()
    page = Page(fd)
    os.close(fd)
    heartbeat.write_to(page, rank=3)
    yield page
    heartbeat.write_to(None)
