"""Templates to a page that needs nothing outside it, and lets nothing in the data act.

All text from shards and networks goes through the template's escaping and `shown`; the page's
own policy allows one script, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import time
import unicodedata
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.errors import RequestError

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError:
    raise RequestError("the page needs jinja2: pip install 'captionjob[report]'") from None

FOLDER = Path(__file__).parent
_KEPT = "\n\t\u200c\u200d"  # joiners belong to emoji and to several scripts
_BIDI = {*"\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}


def render(template: str, title: str, **values: object) -> str:
    """Return the page; `values` are what the template names."""
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "percent": percent, "logprob": logprob}
    page = environment.get_template(template).render(
        title=shown(title),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")),
        version=_version(),
        made=time.strftime("%Y-%m-%d %H:%M"),
        **values,
    )
    return page.encode("utf-8", "backslashreplace").decode()


def shown(text: object) -> str:
    """Make characters visible that would act or hide: control characters, direction marks."""
    if text is None:
        return ""
    return "".join(char if not _acts(char) else _escape(char) for char in str(text))


def percent(share: float) -> str:
    """Return a share such as `12 %`, with a decimal where it is small."""
    return f"{share:.1%}" if 0 < share < 0.1 or 0.9 < share < 1 else f"{share:.0%}"


def logprob(value: float) -> str:
    """Return a mean log-probability; of very sure captions a digit more."""
    return f"{value:.3f}" if value > -0.01 else f"{value:.2f}"


def trusted(svg: str) -> Markup:
    """Let a drawing of our own through the escaping; it holds numbers and fixed words only."""
    return Markup(svg)


def _acts(char: str) -> bool:
    if char in _KEPT:
        return False
    return char in _BIDI or unicodedata.category(char) in ("Cc", "Cs")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _version() -> str:
    try:
        return version("captionjob")
    except PackageNotFoundError:
        return ""
