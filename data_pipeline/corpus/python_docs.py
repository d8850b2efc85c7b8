"""Extract English prose from the docstrings of the Python installation: the built-in corpus.

`corpus.builtin: python-docs` selects it, so that the quick start needs no download. Modules are
parsed with `ast` and never imported.
"""

import ast
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

TOPICS = "topics"
# Only required dependencies, so that the corpus does not depend on which extras are installed.
PACKAGES = ("accelerate", "datasets", "numpy", "omegaconf", "tokenizers", "torch", "wandb")
SKIPPED_FOLDERS = set("site-packages dist-packages test tests idle_test testing".split())
SKIPPED_FOLDERS |= set("vendor _vendor autoheuristic".split())
MIN_DOCUMENT_SENTENCES = 3
MIN_DOCUMENT_CHARACTERS = 200

# These directives contain prose; all others contain code, maths or a bare label.
PROSE_DIRECTIVE = re.compile(
    r"\.\. *(note|warning|tip|important|caution|attention|hint|danger|seealso|admonition)::", re.I
)
DIRECTIVE = re.compile(r"\.\.( |$)")
RULE = re.compile(r"([=\-~^*#_+.`\"'])\1{2,}[=\-~^*#+|\s]*$")
# Table rows, signatures, placeholders, tags, comments, commands and section headings.
NOISE = re.compile(
    r"[|+].*[|+]$|(\w+ )?[\w.]+\([^()]*\)(\s*->.*)?:?$|[\w.]+\(.*\)\s*->|\{\w+\}$|</?\w.*>$|[#$%@]"
    r"|[A-Z]\w*( [A-Z]\w*)?::?$"
)
BULLET = r"([-*+•]|\(?(\d{1,2}|[a-zA-Z])[.)])\s+(?=\S)"
FIELD = (
    r":\w[^:`]*:(\s+|$)"
    r"|[*`]*([A-Za-z_][\w.,*` ]{0,40})?\([^()]*\)[*`]*\s*:[*`]*(\s+|$)"
    r"|[*`]*[a-z_][\w.]*[*`]*:[*`]*\s+"
    r"|\([\w., |]{1,40}\)\s+(?=[A-Z])"
    r"|[\w.*`, ]{1,40} : (?=[A-Z]\w* [a-z])"
)
MARKER = re.compile(rf"({BULLET})?({FIELD})*")
TERM = re.compile(r"[\w.*`, ]+ : ")
HEAD = re.compile(r"[\w.*`, ]+( : .*|:)$|[\w.*`]+$")  # a term with its definition indented below

INLINE = [
    (r":math:`([\w.]{1,3})`", r"\1"),
    (r":math:`[^`]*`", r"\\mathrm"),  # `CODE` then drops the sentence
    (r":[\w:+-]+:(?=`)", ""),
    (r"(?<!`)`([\w.-]+)'", r"'\1'"),
    (r"`~[\w.]*?(\w+(\(\))?)`", r"\1"),
    (r"``(.+?)``", r"\1"),
    (r"(?<!\w)`(?=\S)([^`]+?)(\s+<[^`>]*>)?`_{0,2}", r"\1"),
    (r"`+", ""),
    (r"\[([^\[\]]+)\]\([^()]*\)", r"\1"),
    (r"\s*\[[\w.#]+\]_", ""),
    (r"(?<![\w*])(\*{1,2})(?=[^\s*])([^*]*[^\s*])\1(?![\w*])", r"\2"),
    (r"\\([*_|` ])", r"\1"),
    (r"::$", ":"),
    (r"\s+", " "),
    (r" (?=[.,;](\s|$))", ""),
]
NOT_LETTERS = re.compile(r"(?!\s)[\W\d_]")
SENTENCE = re.compile(r"[.!?:][\"'”’)]*$")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
CODE = re.compile(r"\\[A-Za-z(\[]|[{}$]|>>>|\w\[.*\]\.|[=!<>+*/-]=| = |;$|->|\*\*\w|https?:|TODO")


def list_modules() -> list[str]:
    """List what is read, in order: the word `topics`, then the path of every Python module."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    # A namespace (no origin) is a stray folder of that name, such as the run folder of wandb.
    packages = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    roots = [Path(sysconfig.get_path("stdlib")), *packages]
    return [TOPICS, *(str(path) for root in roots for path in _python_files(root))]


def read_module(module: str) -> list[list[str]]:
    """Read the documents of one item of `list_modules`, each a list of paragraphs."""
    if module == TOPICS:
        return [prose(topics[name]) for name in sorted(topics)]
    return [[paragraph for text in _docstrings(Path(module)) for paragraph in prose(text)]]


def read_python_docs() -> Iterator[str]:
    """Yield the documents, one paragraph per line, without paragraphs that occurred before."""
    seen: set[str] = set()
    for module in list_modules():
        for paragraphs in read_module(module):
            fresh = [text for text in paragraphs if _is_new(text, seen)]
            document = "\n".join(fresh)
            sentences = sum(len(SENTENCE_END.split(text)) for text in fresh)
            if sentences >= MIN_DOCUMENT_SENTENCES and len(document) >= MIN_DOCUMENT_CHARACTERS:
                yield document


def prose(docstring: str) -> list[str]:
    """Extract the paragraphs of a docstring that are English prose, unwrapped, without markup."""
    paragraphs = (_plain(text) for text in _paragraphs(_text_lines(inspect.cleandoc(docstring))))
    return [text for text in paragraphs if _is_prose(text)]


def _python_files(root: Path) -> list[Path]:
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in third-party code
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or written for another Python version
            return
    yield from _strings(tree.body)


def _strings(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield every bare string and every `add_docstr` string, in source order.

    Visits statements but not the expressions in them, which is far cheaper than `ast.walk`.
    """
    for node in statements:
        if isinstance(node, ast.Expr | ast.Assign):
            yield from _documentation(node)
        else:
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from _strings(getattr(node, block, ()))


def _documentation(node: ast.Expr | ast.Assign) -> Iterator[str]:
    value = node.value
    if isinstance(value, ast.Call):
        name = getattr(value.func, "attr", getattr(value.func, "id", ""))
        if name.endswith(("add_docstr", "add_docstr_all", "add_newdoc")):
            parts = (part for argument in value.args for part in ast.walk(argument))
            yield from (part.value for part in parts if _is_string(part))
    elif isinstance(node, ast.Expr) and _is_string(value):
        yield value.value


def _is_string(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text_lines(text: str) -> Iterator[str]:
    """Yield the lines of prose, and a blank line for each line of code, doctest or directive."""
    block: int | None = None  # the indent of the line that opened a literal block
    doctest = fenced = False
    for line in text.splitlines():
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        fence = bare.startswith(("```", "~~~"))
        fenced ^= fence
        doctest = bool(bare) and (doctest or bare.startswith((">>>", "In [")))
        if block is not None and bare and indent <= block:
            block = None
        if not bare or fence or fenced or doctest or block is not None:
            yield ""
        elif marker := PROSE_DIRECTIVE.match(bare):
            yield from ("", " " * indent + bare[marker.end() :])
        elif DIRECTIVE.match(bare):
            block = indent
            yield ""
        else:
            block = indent if bare.endswith("::") else None
            yield line


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Join wrapped lines to paragraphs; a blank, bullet, field or change of indent begins one."""
    words: list[str] = []
    last = 0
    for line in lines:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        marker = MARKER.match(bare).end()
        rule = RULE.match(bare)
        dropped = rule or NOISE.match(bare)
        deeper = words and indent > last and HEAD.match(words[-1])
        if not bare or dropped or marker or TERM.match(bare) or deeper or indent < last:
            if words and not rule:  # a line above a rule is a title
                yield " ".join(words)
            words = []
        if not dropped and bare[marker:]:
            words.append(bare[marker:])
        last = indent
    if words:
        yield " ".join(words)


def _plain(text: str) -> str:
    """Remove inline markup, and drop the sentences that contain maths or code."""
    for pattern, replacement in INLINE:
        text = re.sub(pattern, replacement, text)
    return " ".join(part for part in SENTENCE_END.split(text) if not CODE.search(part)).strip()


def _is_prose(text: str) -> bool:
    if not SENTENCE.search(text):
        return False
    words = [word for word in text.split() if word.strip("\"'“”‘’().,;:!?").isalpha()]
    return len(words) >= 5 and len(NOT_LETTERS.sub("", text)) >= 0.85 * len(text)


def _is_new(text: str, seen: set[str]) -> bool:
    key = " ".join(text.casefold().split())
    return not (key in seen or seen.add(key))
