"""Document to HTML, by the templates that ship with the package.

Everything is escaped, whatever the template's ending, and an undefined name is an error rather than an empty cell.
"""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from reports.document import Document
from reports.errors import RenderError
from reports.text import visible


def templates_folder() -> Path:
    """Return where the templates are: inside the installed package, or at the top of a source checkout.

    Raises:
        RenderError: If neither place has them.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "templates", here.parent / "templates"):
        if (folder / "report.html.j2").is_file():
            return folder
    raise RenderError("the report templates are missing", "Install gradtrail again: pip install 'gradtrail[report]'.")


def _shown(value: object) -> object:
    """Spell out what is hidden in a string. Markup is ours and stays as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def render_html(document: Document) -> str:
    """Return the report as one HTML page that refers to nothing outside itself.

    Raises:
        RenderError: If a template fails; the message names it and the line.
    """
    folder = templates_folder()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = Markup((folder / "report.css").read_text(encoding="utf-8"))
    try:
        return environment.get_template("report.html.j2").render(document=document, css=css)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"{error.name}, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise RenderError(f"report.html.j2: {error.message}") from error
