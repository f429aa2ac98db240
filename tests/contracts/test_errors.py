"""Every error of the three packages is one family that a command line can end with."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import pytest

import attribution
import auditlog
import reports
from auditlog.errors import Error


def exception_classes() -> list[type[BaseException]]:
    found = set()
    for package in (auditlog, attribution, reports):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            module = importlib.import_module(info.name)
            found |= {
                value
                for _, value in inspect.getmembers(module, inspect.isclass)
                if issubclass(value, BaseException)
                and not issubclass(value, Warning)
                and value.__module__ == module.__name__
                and not module.__name__.endswith(".verify_gradtrail")  # one file, on purpose without our errors
            }
    return sorted(found, key=lambda c: c.__qualname__)


@pytest.mark.parametrize("kind", exception_classes(), ids=lambda c: c.__qualname__)
def test_each_error_derives_from_the_root_has_an_exit_code_and_survives_pickling(kind: type[Error]) -> None:
    assert issubclass(kind, Error)
    assert kind.exit_code in (2, 3), "4 to 7 are verdicts, 1 is for our own bugs"
    error = kind("what is wrong", "what to do")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.advice(), type(again)) == ("what is wrong", "what to do", kind)
