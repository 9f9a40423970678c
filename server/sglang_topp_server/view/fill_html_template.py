"""Fill the HTML template of `sglang-topp view` with the style, the script, the data, and the security policy.

The page holds its data as JSON or base64, in script elements that browsers do not execute. The data never
contain the character `<`, and so cannot end a script element early. `_json_text` escapes each `<` in the
JSON, and base64 does not use `<`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

__all__ = ["content_security_policy", "page_chunks", "script_text"]

# The JavaScript modules, in the order in which `script_text` concatenates them into one script. A module's
# top-level code may use only modules that come earlier in this list.
_MODULES = (
    "dom.js",
    "number_format.js",
    "token_colors.js",
    "page_data.js",
    "charts.js",
    "verdict.js",
    "distribution_charts.js",
    "rollout_table.js",
    "worst_tokens.js",
    "token_names.js",
    "candidate_bars.js",
    "token_flow.js",
    "rollout_view.js",
    "app.js",
)
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const |function |class |async )", re.MULTILINE)


def _asset(name: str) -> str:
    return files("sglang_topp_server.view").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def script_text() -> str:
    """Return all JavaScript modules as one script, without imports and exports.

    All modules share one scope in the script, so two modules must not define the same name.
    """
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _asset(name))) for name in _MODULES)


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def content_security_policy() -> str:
    """Return the content security policy, which allows only the page's own script and style."""
    return (
        f"default-src 'none'; script-src {_source_hash(script_text())};"
        f" style-src {_source_hash(_asset('page.css'))}; base-uri 'none'; form-action 'none'"
    )


def _json_text(value: Any) -> str:
    """Encode `value` as JSON with `<`, `>`, and `&` escaped, so that the JSON contains no HTML tags."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_chunks(
    title: str, overview: Mapping[str, Any], details: Sequence[tuple[int, bytes]]
) -> Iterator[bytes]:
    """Yield the HTML of the page in chunks.

    Args:
        title: the page's title, any text.
        overview: the statistics and the table of all rollouts, as JSON values.
        details: the row number and the encoded tokens of each rollout that the page shows token by token.
    """
    head, body, tail = re.split(r"<!-- (?:STYLE|DATA) -->\n", _asset("page.html"))
    yield (
        head.replace("{{policy}}", escape(content_security_policy()))
        .replace("{{title}}", escape(title))
        .encode()
    )
    yield f"<style>{_asset('page.css')}</style>\n".encode()
    yield body.encode()
    yield f'<script type="application/json" id="overview">{_json_text(overview)}</script>\n'.encode()
    for row, raw in details:
        yield f'<script type="text/plain" id="detail-{row}">'.encode()
        yield base64.b64encode(raw)
        yield b"</script>\n"
    yield f'<script type="module">{script_text()}</script>\n'.encode()
    yield tail.encode()
