"""Which line of a stack is the user's own, and so where a warning is shown."""

from __future__ import annotations

import sys
import threading

import pytest

from evenstep.ground.health.users_code import PACKAGE, TORCH, user_site, warn


def test_a_warning_is_shown_at_the_users_line_whoever_notices_it() -> None:
    namespace = {"warn": warn, "__name__": "evenstep.somewhere"}
    exec(compile("def notice():\n    warn('mind the gap')", f"{PACKAGE}somewhere.py", "exec"), namespace)
    exec(compile("def call():\n    notice()", f"{TORCH}somewhere.py", "exec"), namespace)
    line = sys._getframe().f_lineno + 2
    with pytest.warns(UserWarning, match="mind the gap") as caught:
        namespace["call"]()  # type: ignore[operator]
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_site_names_file_line_and_function() -> None:
    line = sys._getframe().f_lineno + 1
    assert user_site() == f"{__file__}:{line} in test_a_site_names_file_line_and_function"


def test_a_thread_of_ours_names_the_main_threads_line() -> None:
    namespace = {"user_site": user_site, "found": [], "__name__": "evenstep.somewhere"}
    exec(compile("def serve():\n    found.append(user_site())", f"{PACKAGE}somewhere.py", "exec"), namespace)
    thread = threading.Thread(target=namespace["serve"])  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert namespace["found"][0].endswith(" in test_a_thread_of_ours_names_the_main_threads_line")  # type: ignore[index]


def test_a_warning_in_code_without_a_module_is_shown() -> None:
    namespace = {"warn": warn}  # as a script's `exec(compile(text, path, "exec"), {})`
    with pytest.warns(UserWarning, match="mind the gap") as caught:
        exec(compile("\nwarn('mind the gap')", "users.py", "exec"), namespace)
    assert (caught[0].filename, caught[0].lineno) == ("users.py", 2)
