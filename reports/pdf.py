"""HTML to PDF/A-3u, in a process of its own, from nothing but the bytes it is given.

The renderer may open no file and no address: the page carries its style and its drawings inside. Equal input gives
equal bytes with the same renderer and fonts, so a report can be checked by making it again.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from auditlog.errors import UsageError
from reports.errors import RenderError

VARIANT = "pdf/a-3u"
_TIMEOUT_S = 180


@dataclass(frozen=True)
class AttachedFile:
    """A file inside the PDF."""

    name: str
    data: bytes
    description: str


def write_pdf(html: str, attachments: Sequence[AttachedFile], *, identifier: bytes, created_s: int) -> bytes:
    """Render one HTML page with its attachments.

    Args:
        html: A page that refers to nothing outside itself.
        attachments: Files to embed.
        identifier: 16 bytes for the PDF's own id.
        created_s: Seconds since 1970, for every date inside the file.

    Raises:
        RenderError: If the renderer fails, asks for anything outside, or takes too long.
        UsageError: If the ``report`` extra is not installed.
    """
    if importlib.util.find_spec("weasyprint") is None:
        raise UsageError("writing a PDF needs the report extra", "Run: pip install 'gradtrail[report]'")
    request = {
        "html": html,
        "identifier": identifier.hex(),
        "created_s": created_s,
        "attachments": [
            {"name": a.name, "data": base64.b64encode(a.data).decode(), "description": a.description}
            for a in attachments
        ],
    }
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(created_s)}  # read by the font subsetter
    try:
        done = subprocess.run(
            [sys.executable, "-m", "reports.pdf"],
            input=json.dumps(request).encode(),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RenderError(f"the PDF renderer did not finish within {_TIMEOUT_S} s") from error
    if done.returncode != 0 or not done.stdout.startswith(b"%PDF-"):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit {done.returncode}"]
        raise RenderError(f"the PDF renderer failed: {lines[-1]}", _advice(lines))
    return done.stdout


def _advice(lines: Sequence[str]) -> str:
    if any("cannot load library" in line for line in lines):
        return "Install Pango: apt-get install libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-dejavu-core"
    return ""


def _render(request: dict[str, Any]) -> bytes:
    """Do the work, in the child process.

    Raises:
        RenderError: If the page asked for anything outside itself.
    """
    from weasyprint import HTML, Attachment
    from weasyprint.urls import FatalURLFetchingError, URLFetcher

    refused: list[str] = []

    class Refuse(URLFetcher):
        """Refuses every address: a request can only come from text that was mistaken for markup."""

        def fetch(self, url: str, headers: object = None) -> object:
            refused.append(url)
            raise FatalURLFetchingError(url)

    created = datetime.fromtimestamp(request["created_s"], UTC)
    attachments = [
        Attachment(
            string=base64.b64decode(item["data"]),
            name=item["name"],
            description=item["description"],
            created=created,
            modified=created,
            relationship="Data",
            url_fetcher=Refuse(),
        )
        for item in request["attachments"]
    ]
    pdf = b""
    with contextlib.suppress(FatalURLFetchingError):  # not raised everywhere, so ``refused`` decides
        pdf = HTML(string=request["html"], url_fetcher=Refuse()).write_pdf(
            pdf_variant=VARIANT, pdf_identifier=bytes.fromhex(request["identifier"]), attachments=attachments
        )
    if refused:
        raise RenderError(f"refused to open {refused[0][:200]}")
    return pdf


def main() -> None:
    """Read a request from stdin, write the PDF to stdout."""
    try:
        pdf = _render(json.load(sys.stdin))
    except RenderError as error:
        sys.exit(error.message)
    except Exception as error:  # the parent turns the last line into a RenderError
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    sys.stdout.buffer.write(pdf)


if __name__ == "__main__":
    main()
