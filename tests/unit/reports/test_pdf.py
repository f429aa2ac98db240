"""The PDF: equal input gives equal bytes, nothing outside is opened, and a hostile text does not break a page."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator

import pytest
from pypdf import PdfReader

from reports.art26 import assemble
from reports.errors import RenderError
from reports.pdf import AttachedFile, write_pdf
from reports.render import render_html
from tests.unit.reports.report_samples import make_subject
from tests.unit.reports.test_document import hostile_subject

IDENTIFIER = bytes(range(16))
CREATED_S = 1_796_083_800
MOST_PAGES = 15
LEFT_PT, RIGHT_PT = 62.0, 534.0  # the page's text area: 22 mm margins on A4, half a point of slack
ATTACHED = [AttachedFile("evidence.json", b'{"a":1}', "everything"), AttachedFile("final.note", b"origin\n3\n", "head")]


def to_pdf(html: str, *, created_s: int = CREATED_S) -> bytes:
    return write_pdf(html, ATTACHED, identifier=IDENTIFIER, created_s=created_s)


@pytest.fixture(scope="module")
def pdf() -> bytes:
    return to_pdf(render_html(assemble(make_subject())))


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A local web server that remembers what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_two_renders_are_byte_equal(pdf: bytes) -> None:
    assert to_pdf(render_html(assemble(make_subject()))) == pdf


def test_another_time_gives_other_bytes() -> None:
    page = "<html><body>text</body></html>"
    assert to_pdf(page, created_s=CREATED_S + 1) != to_pdf(page)


def test_it_declares_pdf_a_3u_and_embeds_its_fonts(pdf: bytes) -> None:
    reader = PdfReader(io.BytesIO(pdf))
    xmp = reader.trailer["/Root"]["/Metadata"].get_data().decode()
    assert 'pdfaid:part="3"' in xmp or "<pdfaid:part>3<" in xmp
    assert 'pdfaid:conformance="U"' in xmp or "<pdfaid:conformance>U<" in xmp
    assert "/OutputIntents" in reader.trailer["/Root"]
    assert not reader.is_encrypted
    fonts = {name for page in reader.pages for name in page["/Resources"]["/Font"].values()}
    names = {str(font.get_object()["/BaseFont"]) for font in fonts}
    assert all("+DejaVu" in name for name in names)


def test_attachments_come_out_as_they_went_in(pdf: bytes) -> None:
    attachments = PdfReader(io.BytesIO(pdf)).attachments
    assert {name: content[0] for name, content in attachments.items()} == {a.name: a.data for a in ATTACHED}


def test_every_page_has_its_number_and_the_report_id(pdf: bytes) -> None:
    pages = PdfReader(io.BytesIO(pdf)).pages
    assert len(pages) <= MOST_PAGES
    for number, page in enumerate(pages, 1):
        text = page.extract_text()
        assert f"Page {number} of {len(pages)}" in text
        assert "art26-3f0c9a7be142" in text
        assert "DRAFT" in text


@pytest.mark.parametrize(
    "markup",
    [
        '<img src="file:///etc/passwd">',
        '<link rel="stylesheet" href="file:///etc/passwd">',
        '<style>@import url("file:///etc/passwd");</style>',
        '<div style="background: url(file:///etc/passwd)">x</div>',
        '<svg width="9" height="9"><image href="file:///etc/passwd" width="9" height="9"/></svg>',
        '<link rel="attachment" href="file:///etc/passwd">',
    ],
)
def test_a_file_is_refused(markup: str) -> None:
    with pytest.raises(RenderError, match="refused to open file:///etc/passwd"):
        to_pdf(f"<html><body><p>text</p>{markup}</body></html>")


def test_an_address_is_refused_before_anybody_is_asked(listener: tuple[str, list[str]]) -> None:
    address, asked = listener
    with pytest.raises(RenderError, match="refused to open http"):
        to_pdf(f'<html><body><img src="{address}/x.png"></body></html>')
    assert asked == []


def test_hostile_strings_stay_inside_the_page() -> None:
    reader = PdfReader(io.BytesIO(to_pdf(render_html(assemble(hostile_subject())))))
    starts: list[float] = []

    def visit(text: str, cm: list[float], tm: list[float], font: object, size: float) -> None:
        if text.strip():
            starts.append(tm[4] * cm[0] + cm[4])

    for page in reader.pages:
        page.extract_text(visitor_text=visit)
    assert min(starts) >= LEFT_PT
    assert max(starts) <= RIGHT_PT
    assert len(reader.pages) <= 2 * MOST_PAGES
