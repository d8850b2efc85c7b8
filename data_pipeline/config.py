"""Define the data sections of a config.

One YAML file describes a whole run (`data_pipeline.config_file` reads it). Preparation uses the
sections defined here; `pretrain.config` adds those of the model to the same dataclass.
"""

import codecs
import os
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from omegaconf import DictConfig

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.plug_ins import is_file

MIN_VOCAB_SIZE = 16
PLUG_INS = "package.module:function, or FILE.py:function of a file beside the config"
is_plug_in = re.compile(r"([^\W\d][\w.]*|(/.*/)?[^/:]+\.py):[^\W\d]\w*").fullmatch
PROBES_FILE = "probes.json"  # in data_dir, what preparation makes of `eval.probes`
HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS = 50, 20_000  # minimum for reliable held-out losses
WITHOUT_ACCENTS = {"en", "zh"}  # languages that lose almost nothing without accents
# the codes of two letters of ISO 639
TWO_LETTERS = """aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs
cu cv cy da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht
hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg
li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa
pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg th
ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu""".split()
# Python's encodings of names and literals, whose text may hold what is none
NO_TEXT = ("idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7")
OF_FILES = ("layout", "text_field", "encoding", "errors", "on_bad_row")  # fields of a source


def number(default: float | None, interval: str) -> Any:
    """Declare a number of a config that, if given, must lie in an interval such as "[0, 1)"."""
    return field(default=default, metadata={"interval": interval})


def check_numbers(section: object, key: str) -> None:
    """Raise `UserError` unless all numbers of a section lie in their intervals."""
    for item in fields(section):
        value, interval = getattr(section, item.name), item.metadata.get("interval")
        if interval and value is not None:
            low, high = map(float, interval[1:-1].split(","))
            within = low < value < high or (value == low and interval[0] == "[")
            within = within or (value == high and interval[-1] == "]")
            name = f"{key}.{item.name}".lstrip(".")
            check(within, f"{name} {value} is not in {interval}")


@dataclass
class DatasetConfig:
    path: str = ""
    """Hub name, or a builder such as `json`, `csv`, `parquet`, as in `datasets.load_dataset`."""
    name: str | None = None
    """Configuration of the dataset."""
    split: str = "train"
    """Split to read."""
    data_files: Any = None
    """Local files or globs for a builder: one or a list."""
    text_column: str = "text"
    """Column that holds a document."""


@dataclass
class SourceConfig:
    builtin: str | None = None
    """`python-docs`: the English prose in the docstrings of Python and of seven packages."""
    files: Any = None
    """Files or globs, also .gz, .bz2, .xz, .zst, or folders of `save_to_disk`: one or a list."""
    dataset: DatasetConfig | None = None
    """Anything that `datasets.load_dataset` reads, streamed."""
    layout: str = "auto"
    """How documents are separated: by a `blank_line`, one per `line`, one per `file`, or one per
    row of `jsonl`, `csv`, `tsv`, `parquet`, `arrow`; `auto` goes by the file's name, then its
    content."""
    text_field: str = "text"
    """Field of a JSON line, or column of a table in `files`, that holds the document."""
    encoding: str = "utf-8"
    """Encoding of the files, by Python's name for it."""
    errors: str = "strict"
    """Bytes that are not text: `strict` stops and names the place, `replace` puts U+FFFD."""
    on_bad_row: str = "stop"
    """What to do with a row of JSON, CSV or TSV without its text: `stop` names it, `skip` skips and
    counts it; more than 1 % of a source always stops."""
    language: str = "en"
    """ISO 639 code, with two letters if there is such a code: for the sentence splitter, and for
    accents if `vocab.strip_accents` is null."""
    word_segmenter: str | None = None
    """Words to mask whole: null: BERT's words; `segmenter`: rjieba's, for Chinese; or a function
    `package.module:function`, or `FILE.py:function` of a file beside the config, that divides a str
    into a list of its words."""
    sentence_splitter: str | None = None
    """Sentence splitter `str -> list[str]`, a function given as for `word_segmenter`; null:
    sentencex."""
    weight: float = number(1.0, "(0, 1e6)")
    """How often a training document is used; 0.5: half of the documents, 2.5: all twice and half of
    them a third time. A held-out document is used once at most."""

    def validate(self, key: str = "corpus") -> None:
        sources = {"builtin": self.builtin, "files": self.files, "dataset": self.dataset}
        given = [name for name, value in sources.items() if value]
        check(
            len(given) == 1,
            f"{key} needs exactly one of builtin, files and dataset, but has "
            f"{' and '.join(given) or 'none'}; KEY=null removes a key",
        )
        check_files(f"{key}.files", self.files)
        if self.dataset:
            check_files(f"{key}.dataset.data_files", self.dataset.data_files)
        if self.builtin is not None:
            check_choice(f"{key}.builtin", self.builtin, ("python-docs",))
        check(
            re.fullmatch(r"[a-z]{2,3}(-\w+)*", self.language) is not None,
            f"{key}.language is {self.language!r}; give an ISO 639 code such as en or zh (put no, "
            "for Norwegian, in quotes: YAML reads it as false)",
        )
        code = self.language.split("-")[0]
        check(
            len(code) > 2 or code in TWO_LETTERS,
            f"{key}.language is {self.language!r}, which is the code of no language; give an ISO "
            "639 code, such as ja for Japanese or ko for Korean",
        )
        for item in fields(SourceConfig):
            has_effect = self.files or item.name not in OF_FILES
            check(
                has_effect or getattr(self, item.name) == item.default,
                f"{key}.{item.name} applies to files only, but {key} has a {given[0]}; remove it "
                "(a dataset names its column in text_column)",
            )
        check_choice(f"{key}.errors", self.errors, ("strict", "replace"))
        check_choice(f"{key}.on_bad_row", self.on_bad_row, ("stop", "skip"))
        words, sentences = self.word_segmenter, self.sentence_splitter
        check(
            words in (None, "segmenter") or is_plug_in(words) is not None,
            f"{key}.word_segmenter is {words!r}; it can be null, segmenter, {PLUG_INS}",
        )
        check(
            sentences is None or is_plug_in(sentences) is not None,
            f"{key}.sentence_splitter is {sentences!r}; it can be null, {PLUG_INS}",
        )
        check_numbers(self, key)
        try:
            "".encode(self.encoding)
            if codecs.lookup(self.encoding).name in NO_TEXT:
                raise LookupError
        except (LookupError, UnicodeError):
            raise UserError(
                f"{key}.encoding {self.encoding!r} is unknown to Python; use one such as utf-8, "
                "gb18030 or cp1252"
            ) from None


@dataclass
class CorpusConfig(SourceConfig):
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources instead of one, each with the fields above. The one with the largest weight
    (above 1 counts as 1) keeps a text that several have, of equal ones the first."""
    plug_ins: list[str] = field(default_factory=list)
    """Modules whose functions `word_segmenter` and `sentence_splitter` may name, since their code
    runs."""
    deduplicate: bool = True
    """Drop repetitions: identical documents, and identical lines of 100 characters or more."""
    held_out_fraction: float = number(0.01, "[0, 1)")
    """Share of documents kept from training for evaluation, chosen by a hash of their text; a small
    corpus holds out more, up to a fifth, so that losses are reliable; 0: none."""

    def validate(self) -> None:
        check_numbers(self, "corpus")
        if self.sources:
            for item in fields(SourceConfig):
                check(
                    getattr(self, item.name) == item.default,
                    f"corpus.{item.name} is set beside corpus.sources; move it into a source",
                )
            for i, source in enumerate(self.sources):
                source.validate(f"corpus.sources[{i}]")
        else:
            super().validate()
        for source in self.each_source():
            for name in (source.word_segmenter, source.sentence_splitter):
                module, colon, _ = (name or "").partition(":")
                check(
                    not colon or module in self.plug_ins or is_file(name),
                    f"{name} runs code of the module {module}; if you trust it, list it: "
                    f"corpus.plug_ins=[{module}]",
                )

    def place_plug_ins(self, folder: str) -> None:
        """Make the paths of plug-ins that are files absolute; they lie in the config's folder."""
        for source in self.each_source():
            for key in ("word_segmenter", "sentence_splitter"):
                if is_file(name := getattr(source, key) or ""):
                    setattr(source, key, os.path.abspath(os.path.join(folder, name)))

    def each_source(self) -> list[SourceConfig]:
        """List the sources in their order; a corpus of one is its own source."""
        return self.sources or [self]


@dataclass
class VocabConfig:
    path: str | None = None
    """An existing vocabulary, `vocab.txt` or a Hugging Face folder; null: that of `init_from`, or
    train one. A tokenizer of another kind than BERT's is used with its own text rules."""
    size: int | None = number(None, "[16, 1e6]")
    """Pieces to train, special tokens included; the file is padded with [unusedN] to a multiple of
    64. Null: 30522, or all of `path` or `init_from`."""
    extend: int | None = number(None, "[1, 1e6]")
    """Pieces of the corpus to add to those of `path` or `init_from`; null: none."""
    lowercase: bool = True
    """Lower-case the text."""
    strip_accents: bool | None = None
    """Drop accents: é becomes e, but also が becomes か and 각 three letters. Null: drop them with
    `lowercase` if all text is English or Chinese, as in their published BERTs, or if `path` or
    `init_from` is given."""
    handle_chinese_chars: bool = True
    """Make every Chinese character a word of its own."""
    min_frequency: int = number(2, "[1, 1e12]")
    """Smallest count of a pair of pieces that is still merged."""
    character_coverage: float = number(0.9999, "(0, 1]")
    """Share of the corpus's characters that the alphabet holds; words with others become [UNK]."""

    def validate(self) -> None:
        check_numbers(self, "vocab")
        check(
            self.extend is None or self.size is None,
            f"vocab.extend {self.extend} and vocab.size {self.size} are both set, but vocab.size "
            "is for training a new vocabulary; remove one",
        )


@dataclass
class PairsConfig:
    max_seq_length: int = number(128, "[8, 1e6]")
    """Tokens of a sequence, [CLS] and both [SEP] included."""
    objective: str = "nsp"
    """`nsp`: is B the text that follows A; `sop`: are A and B in order; `none`: single segments."""
    single_segment_prob: float = number(0.0, "[0, 1]")
    """Share of the sequences that have a single segment and no pair label, even if the objective
    uses pairs. Evaluations use pairs only, or single segments only in a phase where this is 1."""
    masking: str = "whole_word"
    """The unit of masking: a `whole_word`, a `span` of 1 to 10 words as in SpanBERT, an `ngram` of
    1 to 3 words as in ALBERT, or each `token` alone."""
    masked_lm_prob: float = number(0.15, "(0, 1)")
    """Share of the ordinary tokens that are predicted."""
    mask_replace_prob: float = number(0.8, "[0, 1]")
    """Share of the predicted tokens that become [MASK]; each token is drawn independently, except
    in a `span`, whose tokens share one draw."""
    random_replace_prob: float = number(0.1, "[0, 1]")
    """Share of the predicted tokens that become random pieces; the rest stay as they are."""
    max_predictions_per_seq: int | None = number(None, "[1, 1e6]")
    """Maximum number of predicted tokens per sequence; null: no limit."""
    short_seq_prob: float = number(0.1, "[0, 1)")
    """Share of the sequences that aim at a random shorter length, as fine-tuning will see. Besides,
    the first of each document aims at a random length of at least half."""

    def validate(self) -> None:
        check_numbers(self, "data")
        check_choice("data.objective", self.objective, ("nsp", "sop", "none"))
        check_choice("data.masking", self.masking, ("whole_word", "span", "ngram", "token"))
        shares = (self.mask_replace_prob, self.random_replace_prob)
        check(
            sum(shares) <= 1,
            f"data.mask_replace_prob and random_replace_prob sum to {sum(shares):g}, but are "
            "shares of the same tokens; lower one, so that they sum to at most 1",
        )
        check(
            self.objective != "none" or not self.single_segment_prob,
            f"data.single_segment_prob is {self.single_segment_prob:g}, but with data.objective "
            "none all sequences have one segment; remove it",
        )


@dataclass
class ProbesConfig:
    minimal_pairs: Any = None
    """Files or folders of minimal pairs, BLiMP's `.jsonl` or `.tsv` of good<TAB>bad: one or a
    list. Folders in a folder are read too."""
    pairs_per_paradigm: int = number(20, "[1, 1e9]")
    """Largest number of pairs of each paradigm, so that an evaluation stays short."""
    sentences: list[str] = field(default_factory=list)
    """Sentences with one or more [MASK], whose five most likely fillings are recorded."""

    def validate(self) -> None:
        check_numbers(self, "eval.probes")
        check_files("eval.probes.minimal_pairs", self.minimal_pairs)
        for sentence in self.sentences:
            check(
                "[MASK]" in sentence,
                f"eval.probes.sentences: no [MASK] in {sentence!r}; put one in the place of a word",
            )


@dataclass
class EvalConfig:
    probes: ProbesConfig = field(default_factory=ProbesConfig)
    """Further questions that each evaluation asks the model. May change when a run resumes."""


@dataclass
class DataConfig:
    run_dir: str = "runs/run"
    """Folder of the run: checkpoints, metrics, export."""
    data_dir: str = "data/data"
    """Folder of the vocabulary and the token store."""
    init_from: str | None = None
    """Hugging Face folder of a model to start from, with its sizes and, unless `vocab.path` is
    given, its vocabulary; null: start from random weights."""
    seed: int = number(0, "[0, 9223372036854775808)")
    """Seed of all that is drawn but evaluations, which have the same sequences for every seed."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """Where the text comes from."""
    vocab: VocabConfig = field(default_factory=VocabConfig)
    """The vocabulary."""
    data: PairsConfig = field(default_factory=PairsConfig)
    """Sentence pairs and masks."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Probes, which preparation encodes, since training loads no tokenizer."""

    @classmethod
    def defaults(cls, given: DictConfig) -> dict:
        """Return default values for fields that neither the file nor the command line has
        `given`."""
        return {}

    def validate(self) -> None:
        check_numbers(self, "")
        for section in (self.corpus, self.vocab, self.data, self.eval.probes):
            section.validate()
        check(
            self.vocab.extend is None or self.vocab.path or self.init_from,
            f"vocab.extend {self.vocab.extend} needs an existing vocabulary; set init_from or "
            "vocab.path, or remove vocab.extend",
        )

    def text_rules(self) -> VocabConfig:
        """Return the section `vocab` with `path` and `strip_accents` decided."""
        vocab = replace(self.vocab, path=self.vocab.path or self.init_from)
        if vocab.strip_accents is not None or vocab.path:
            return vocab
        languages = {source.language.split("-")[0] for source in self.corpus.each_source()}
        strips = vocab.lowercase and languages <= WITHOUT_ACCENTS
        return replace(vocab, strip_accents=strips)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `UserError` that lists the choices unless `value` is one of them."""
    check(value in choices, f"{name} is {value!r}; it can be {', '.join(choices)}")


def check_files(key: str, value: Any) -> None:
    """Raise `UserError` if a value is neither null, nor a string, nor a list of them."""
    names = [value] if isinstance(value, str) else [] if value is None else value
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    check(are_names, f"{key} is {value!r}; it can be a file or a list of files")


def to_list(value: Any) -> list[str]:
    """Make a list of strings from one string or a list of them."""
    return [value] if isinstance(value, str) else list(value or [])
