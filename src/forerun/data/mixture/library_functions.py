"""Functions of Python's standard library to write again, from their signature and docstring.

Other Python versions document other functions, so these prompts alone depend on the version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

from forerun.data.mixture.code import ask_to_complete

_MODULES = (
    "argparse ast asyncio base64 bisect calendar cmd code codecs collections colorsys configparser "
    "contextlib copy csv dataclasses datetime decimal difflib dis email.utils enum filecmp "
    "fileinput fnmatch fractions ftplib functools getopt gettext glob gzip heapq html http.client "
    "http.cookies imaplib importlib.util inspect io ipaddress json keyword linecache locale "
    "logging mailbox mimetypes ntpath operator optparse os pathlib pickle pkgutil platform "
    "plistlib posixpath pprint quopri random re reprlib sched secrets selectors shelve shlex "
    "shutil smtplib socket socketserver statistics string stringprep subprocess symtable sysconfig "
    "tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest "
    "urllib.parse urllib.request uuid warnings weakref xml.dom.minidom xml.etree.ElementTree "
    "xmlrpc.client zipapp zipfile"
)
_DOC_CHARS = range(40, 900)


def make_library_functions() -> Iterator[tuple[str, str]]:
    """Yield every documented function and method of the modules that has a signature."""
    for module_name in _MODULES.split(" "):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        yield from _read_module(module)


def _read_module(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name, member in sorted(vars(module).items()):
        if getattr(member, "__module__", None) != module.__name__ or name.startswith("_"):
            continue
        if inspect.isfunction(member):
            yield from _read_function(f"{module.__name__}.{name}", member)
        elif inspect.isclass(member):
            for method_name, method in sorted(vars(member).items()):
                if inspect.isfunction(method) and not method_name.startswith("_"):
                    yield from _read_function(f"{module.__name__}.{name}.{method_name}", method)


def _read_function(path: str, function: object) -> Iterator[tuple[str, str]]:
    doc = inspect.cleandoc(getattr(function, "__doc__", None) or "")
    if len(doc) not in _DOC_CHARS or not doc.isascii() or '"""' in doc:
        return
    head = f"def {path.rsplit('.', 1)[1]}{_show_signature(function)}:"
    body = "\n".join(f"    {line}".rstrip() for line in f'"""{doc}\n"""'.splitlines())
    yield path, ask_to_complete(f"{head}\n{body}")


def _show_signature(function: object) -> str:
    """Return the parameters; a default that is no literal becomes None."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty, default=_keep_literal(parameter.default)
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _keep_literal(default: object) -> object:
    is_plain = type(default) in (bool, int, float, str, bytes)
    return default if is_plain or default is inspect.Parameter.empty else None
