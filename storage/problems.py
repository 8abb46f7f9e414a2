"""Texts for messages: lists of problems, values and URIs that are safe to print, sizes, and installation hints.

`json_values` bounds the number of values in a JSON text before it is parsed.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator

MAX_LISTED = 20  # a hostile file can have a million problems
MAX_QUOTED = 120  # characters of a name in a message


def quote(value: object) -> str:
    """Return `value` for a message: quoted, with control characters escaped, and cut if it is long or deep."""
    if not isinstance(value, str):
        return reprlib.repr(value)
    cut = value if len(value) <= MAX_QUOTED else f"{value[:MAX_QUOTED]}... ({len(value)} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in f"'{cut}'")


_STEPS = ("B", "kB", "MB", "GB", "TB", "PB")


def show_bytes(count: float) -> str:
    """Return a size in decimal units with three digits: `1.07 GB`, `512 kB`, `7 B`."""
    power = 0
    while abs(count) >= 999.5 and power < len(_STEPS) - 1:
        count /= 1000
        power += 1
    if power == 0:
        return f"{count:.0f} B"
    digits = max(0, 3 - len(str(int(abs(count)))))
    return f"{count:.{digits}f} {_STEPS[power]}"


_HEAD = re.compile(r"[^/?#@\s]*:/+")  # "s3://"; one slash is taken for a typing error
_SCHEMES_WITH_AT = ("az:", "abfs:", "abfss:")  # Azure writes az://container@account
_HOST_AND_PORT = re.compile(r"(\[[^\]@]*\]|[^:\[\]]*)(:[0-9]{0,5})?")
_BARE_QUERY = re.compile(r"\?[^/?]*=")  # of a URL that was pasted without its scheme
_WORD = re.compile(r"[^\s'\"<>(),;]+")
_HIDDEN = "<hidden>"
_SECRETS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"), _HIDDEN),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), _HIDDEN),  # a token of Hugging Face
    (
        re.compile(
            r"(?i)(?<![A-Za-z0-9])((?:x-amz-(?:signature|credential|security-token)|access_?key(?:_?id)?|secret\w*|sig|signature"
            r"|session_?token|token|password|passwd|api_?key|account_?key|private_?key|cookie)\\?[\"']?\s*[=:]\s*\\?[\"']?)"
            r"(?:(?<=[\"'])[^\"'\r\n]+|[^\s&\"',}]+)"  # in quotes: up to the next, words and all
        ),
        rf"\g<1>{_HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer|basic|aws4-hmac-sha256)\s+[^\r\n]+"), rf"\g<1> {_HIDDEN}"),
)


def printable_uri(uri: str) -> str:
    """Return a URI or a path without parts that may be secret: user, password, query and fragment.

    Every message with a URI from outside uses this. A local path is not changed, unless it looks like a URL that was
    pasted without its scheme.
    """
    head = _HEAD.match(uri)
    if head is None:
        place = _BARE_QUERY.split(uri, maxsplit=1)[0]
        has_password = "@" in re.split(r"[/\s]", uri, maxsplit=1)[0].partition(":")[2]
        return place.rpartition("@")[2] if has_password else place
    place = re.split(r"[?#]", uri[head.end() :], maxsplit=1)[0]
    authority = "" if head[0].lower() == "file:///" else place.partition("/")[0]
    user, at, host = authority.rpartition("@")
    plain = not at or (head[0].lower().startswith(_SCHEMES_WITH_AT) and ":" not in user)
    if not plain or not (_HOST_AND_PORT.fullmatch(host) or "::" in host):
        # A password may contain a slash, a question mark or an @, so everything up to the last @ may belong to it.
        _, at, place = uri[head.end() :].rpartition("@")
        place = re.split(r"[?#]", place, maxsplit=1)[0] if at else ""
        host, slash, path = place.partition("/")
        if not _HOST_AND_PORT.fullmatch(host) and "::" not in host:
            place = _HIDDEN + slash + path
    return head[0] + place


def without_secrets(text: str) -> str:
    """Return a text without anything that looks like a password, token or signature, and with printable URIs."""
    text = _WORD.sub(lambda word: printable_uri(word[0]) if any(c in word[0] for c in "?#@") else word[0], text)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def install_hint(extra: str) -> str:
    """Return how to install an extra of Longshore from a checkout or a wheel.

    The hint contains no name for PyPI, because the name is not registered there and anybody could take it.
    """
    return f"pip install '.[{extra}]' in a checkout of Longshore, or 'PATH/TO/THE_WHEEL.whl[{extra}]'"


class Problems:
    """A list of sentences that keeps the first MAX_LISTED and counts the others."""

    def __init__(self, problems: Iterable[str] = ()) -> None:
        self._listed: list[str] = []
        self.count = 0
        for problem in problems:
            self.add(problem)

    def add(self, problem: str) -> None:
        """Add one problem."""
        self.count += 1
        if len(self._listed) < MAX_LISTED:
            self._listed.append(problem)

    @property
    def full(self) -> bool:
        """Return whether further problems would only be counted."""
        return len(self._listed) >= MAX_LISTED

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __str__(self) -> str:
        more = self.count - len(self._listed)
        return "; ".join(self._listed) + (f"; and {more} more" if more else "")


def json_values(data: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text, to limit the memory of parsing it.

    Commas and brackets inside strings count, too. A parsed value takes some 60 to 100 bytes of memory, and two bytes of
    text are enough for one.
    """
    return data.count(b",") + data.count(b"{") + data.count(b"[") + 1
