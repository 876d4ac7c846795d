"""Indented text that remembers which of its lines came from which line of the user's file."""

from __future__ import annotations

from pk.ir.nodes import Span

INDENT = "    "
OWN = "#line pk"  # what follows was made from no line of the user; see ``mapped``


class Lines:
    """Lines under construction.  ``open``/``close`` nest; ``source`` says whose code follows."""

    def __init__(self, indent: int = 0) -> None:
        self._lines: list[str] = []
        self._depth = indent
        self._quoted: tuple[str, int] | None = None

    def add(self, text: str) -> None:
        """Append ``text``, one or more lines, at the current depth."""
        for line in text.splitlines():
            self._lines.append(f"{INDENT * self._depth}{line}" if line.strip() else "")

    def open(self, text: str) -> None:
        """Append ``text`` (which ends with a brace) and indent what follows."""
        self.add(text)
        self._depth += 1

    def close(self, text: str = "}") -> None:
        """Take the last indentation back and append ``text``."""
        self._depth -= 1
        self.add(text)

    def close_open(self, text: str) -> None:
        """Append ``text`` (``} else {``) one level out, without a change of depth."""
        self.close(text)
        self._depth += 1

    def own(self) -> None:
        """What follows was made from no line of the user."""
        self._lines.append(OWN)

    def source(self, span: Span) -> None:
        """What follows was made from ``span``: map it for the compiler, and quote its line (once in a row)."""
        if not span.line:
            return
        if self._quoted != (span.file, span.line) and span.text.strip():
            self.add(f"// {quote(span)}")
        self._quoted = (span.file, span.line)
        self._lines.append(mark(span))

    def open_source(self, text: str, span: Span) -> None:
        """As ``source`` and ``open``, with the quoted line behind the brace."""
        if span.line:
            self._lines.append(mark(span))
            self._quoted = (span.file, span.line)
        self.open(f"{text}  // {quote(span)}" if quote(span) else text)

    def text(self) -> str:
        """All lines so far."""
        return "\n".join(self._lines)


def quote(span: Span) -> str:
    """The first line of ``span`` as a comment may hold it: a backslash at its end would swallow the next line."""
    return span.text.strip().rstrip("\\")


def aligned(text: str) -> str:
    """``text`` with the comments behind its lines of code in one column."""
    lines = [line.split("  // ", 1) for line in text.split("\n")]
    width = max((len(code[0].rstrip()) for code in lines if len(code) == 2), default=0)
    return "\n".join(f"{code[0].rstrip():<{width}}  // {code[1]}" if len(code) == 2 else code[0] for code in lines)


def mark(span: Span) -> str:
    """The directive that maps the next line to ``span``."""
    file = span.file.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line {span.line} "{file}"'


def readable(text: str) -> str:
    """Emitted text without its ``#line`` directives: for people, dumps and golden files."""
    return "\n".join(line for line in text.split("\n") if not line.startswith("#line "))


def mapped(text: str, name: str) -> str:
    """``text`` with each ``OWN`` line replaced by the directive that maps what follows to itself, in file ``name``."""
    lines = text.split("\n")
    return "\n".join(f'#line {i + 2} "{name}"' if line == OWN else line for i, line in enumerate(lines))
