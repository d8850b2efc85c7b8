"""The stages of a preparation, and what they share.

    stage       its tasks, one per file chunk                         then, in one process
    comparing   hash the documents (only where needed)                find duplicates
    reading     select documents, split them into sentences, and      train the vocabulary on the
                number their words                                    word counts
    encoding    replace word numbers by token ids                     assemble the token store

A task of a stage is a pure function from a file chunk to an atomic folder in `data_dir/work`, whose
name begins with a hash of the settings.
"""

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

from data_pipeline.build.assemble import (
    assemble_store,
    describe_sources,
    print_store,
    warn_store,
)
from data_pipeline.build.encode import encode_scan, merge_counts, scan_group
from data_pipeline.build.identity import settings_key, store_settings
from data_pipeline.build.probes import read_pairs, write_probes
from data_pipeline.build.workers import Task
from data_pipeline.common.errors import UserError, red
from data_pipeline.common.folders import install_files, remove_entries, sealed_folder
from data_pipeline.config import DataConfig, SourceConfig, to_list
from data_pipeline.corpus.readers import BAD_ROWS, FileChunk, Rejects, left_out, read_documents
from data_pipeline.corpus.selection import (
    find_earlier,
    hash_group,
    needs_selection,
    select,
)
from data_pipeline.corpus.sources import (
    count_bytes,
    group_chunks,
    list_file_chunks,
    name_source,
    sample_hash,
)
from data_pipeline.sampling.manifest import SPLITS
from data_pipeline.sampling.vocabulary import Vocabulary, read_vocabulary
from data_pipeline.vocabulary.coverage import measure_accents, print_report, report_vocabulary
from data_pipeline.vocabulary.existing import (
    final_size,
    load_whole,
    make_vocabulary,
    read_existing,
    write_whole,
)
from data_pipeline.vocabulary.training import write_tokenizer

MOST_BAD = 0.01  # share of bad rows of a source that may be skipped
CHINESE = "most of the text is Chinese, but its language is set to {}; set corpus.language=zh"
SEGMENT = ", and corpus.word_segmenter=segmenter to mask whole words instead of characters"
NOT_LATIN = (
    "most of its letters are not Latin, but its language is set to {}; set corpus.language, which "
    "decides where sentences end and whether accents stay"
)
WRAPPED = (
    "its lines seem wrapped at {} characters, but a line is a paragraph, and no sentence goes on "
    "in the next; unwrap it, as docs/corpus.md shows"
)
SINITIC = ("zh", "yue", "wuu", "gan", "hak", "nan", "lzh")  # languages of Chinese characters
SAMPLE = 1 << 20  # characters of each source in which the loss of accents is measured
LANGUAGE_SAMPLE = 1 << 16  # characters of each source that show its script and wrapped lines
# Of the files in `work`: 1 and 2 divided the text among the tasks in another way, 3 kept no
# checksums, 4 had words of other tokenizers as text, 5 to 7, 10 and 12 other rules of where a
# sentence ends, 8, 9 and 11 of which copy is kept.
WORK_VERSION = 13
is_work = re.compile(r"[0-9a-f]{16}-").match  # names in `work` begin with a hash of the settings
Plan = list[tuple[Path, Task]]  # the tasks of a stage, each with the folder that it writes


class Work:
    """What the stages of one preparation share: a corpus, its settings and folders for results."""

    def __init__(self, config: DataConfig):
        self.config, self.corpus, vocab = config, config.corpus, config.text_rules()
        path = vocab.path and os.path.abspath(os.path.expanduser(vocab.path))  # for other folders
        self.vocab = replace(vocab, path=path)
        self.data_dir = Path(config.data_dir).absolute()
        self.folder = self.data_dir / "work"
        self.chunks, self.existing = list_file_chunks(self.corpus), read_existing(self.vocab)
        self.probes, named = config.eval.probes, to_list(config.eval.probes.minimal_pairs)
        self.pairs = read_pairs(named, self.probes.pairs_per_paradigm) if named else []
        self.whole = load_whole(self.vocab)
        vocab = replace(config.vocab, size=final_size(config.vocab, self.existing))
        # the pieces of another kind of tokenizer do not tell how it divides text
        known = [*self.existing, self.whole.to_str()] if self.whole else self.existing
        self.settings = store_settings(self.corpus, vocab, self.chunks, known)
        self.name = settings_key(self.settings | {"work": WORK_VERSION})[:16]
        self.groups = group_chunks(self.chunks)
        self.hashed, self.scans = self.results("hashes"), self.results("scan")
        self.earlier = self.folder / f"{self.name}-earlier"
        self.vocab_dir = self.folder / f"{self.name}-vocab"

    def results(self, kind: str) -> list[Path]:
        """Name the folder that the task of each group writes."""
        return [self.folder / f"{self.name}-{kind}-{i:05d}" for i in range(len(self.groups))]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.vocab_dir)

    @cached_property
    def shards(self) -> list[Path]:
        """Name the encoded shards, which have other names for another vocabulary."""
        return self.results(f"{self.vocabulary.sha256[:16]}-shard")

    @cached_property
    def stats(self) -> list[dict]:
        return [json.loads((scan / "stats.json").read_text()) for scan in self.scans]


def is_compared(work: Work) -> bool:
    done = is_read(work) or work.earlier.exists()
    return done or not needs_selection(work.corpus, count_bytes(work.chunks))


def plan_comparing(work: Work) -> Plan:
    sources = work.corpus.each_source()
    both = zip(work.groups, work.hashed, strict=True)
    return [group_task(hash_group, group, out, sources[group[0].source]) for group, out in both]


def write_earlier(work: Work) -> None:
    """Find the texts of each group that an earlier group has."""
    find_earlier(work.corpus, work.groups, work.hashed, work.earlier)


def is_read(work: Work) -> bool:
    return work.vocab_dir.exists()


def plan_reading(work: Work) -> Plan:
    """Plan to read what deduplication, the held-out split and source weights select."""
    selected = select(work.corpus, work.groups, work.hashed, work.earlier)
    return [
        group_task(scan_group, group, scan, work.corpus, work.vocab, chosen)
        for group, scan, chosen in zip(work.groups, work.scans, selected, strict=True)
    ]


def write_vocab(work: Work) -> None:
    """Check that the corpus holds text, train the vocabulary on its training words, and report how
    it fits the held-out ones."""
    check_unchanged(work.chunks)
    check_corpus(work.stats, work.config, work.groups)
    warn_of_text(work)
    whole = work.whole is not None
    counts, unseen = (merge_counts(work.scans, split, whole) for split in SPLITS)
    try:
        pieces = make_vocabulary(counts, work.vocab, work.existing)
    except UserError as error:
        names = ", ".join(map(name_source, work.corpus.each_source()[:3]))
        raise UserError(f"{names}: {error}") from None
    report = report_vocabulary(pieces, len(work.existing), counts, unseen, work.vocab, whole)
    sources = range(len(work.corpus.each_source()))
    sample = chain.from_iterable(sample_source(work, i, SAMPLE) for i in sources)
    report["accents"] = {} if whole else measure_accents(sample, work.vocab)
    with sealed_folder(work.vocab_dir) as folder:
        if whole:
            write_whole(folder, work.whole)
        else:
            write_tokenizer(folder, pieces, work.vocab)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        install_files(folder, work.data_dir / "vocab")  # already, to inspect it during encoding
    print_report(report)


def warn_of_text(work: Work) -> None:
    """Warn of sources whose text is not in their configured language, or wrapped at a width."""
    for i, source in enumerate(work.corpus.each_source()):
        documents = list(sample_source(work, i, LANGUAGE_SAMPLE))
        sample, told = "".join(documents), ""
        if width := find_wrap([line for text in documents for line in text.splitlines()]):
            print(red(f"warning: {name_source(source)}: {WRAPPED.format(width)}"))
        if source.language.split("-")[0] not in SINITIC and is_chinese(sample):
            told = CHINESE.format(source.language) + SEGMENT * (work.whole is None)
        elif source.language == SourceConfig.language and is_not_latin(sample):
            told = NOT_LATIN.format(source.language)
        if told:
            print(red(f"warning: {name_source(source)}: {told}"))


def check_unchanged(chunks: list[FileChunk]) -> None:
    """Raise `UserError` if a corpus file has changed since preparation began: its parts would come
    from different texts, and no later start would notice."""
    for path, version in {chunk.path: chunk.version for chunk in chunks if chunk.version}.items():
        if not os.path.isfile(path) or sample_hash(path) != version:
            raise UserError(
                f"corpus file {path} changed while the corpus was read; start again, and leave "
                "its files as they are until then"
            )


def sample_source(work: Work, i: int, characters: int) -> Iterator[str]:
    """Yield documents from the start of source `i`, up to so many characters of it."""
    source = work.corpus.each_source()[i]
    chunks = (chunk for chunk in work.chunks if chunk.source == i)
    for document in chain.from_iterable(read_documents(c, source, Rejects()) for c in chunks):
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            break


def is_chinese(text: str) -> bool:
    """Tell whether most letters are Chinese characters, and few are Japanese ones."""
    chinese, kana = (len(re.findall(f"[{letters}]", text)) for letters in ("一-鿿", "ぁ-ヿ"))
    return 2 * chinese > sum(map(str.isalpha, text)) and 10 * kana < chinese


def find_wrap(lines: list[str]) -> int:
    """Estimate the width at which lines are wrapped, or return 0 if they do not seem to be.

    Most lines of wrapped text are nearly as long as the longest, and most of these end inside a
    sentence, which goes on in the next line with no capital.
    """
    lines = [line.strip() for line in lines if line.strip()]
    if len(lines) < 100:
        return 0
    width = sorted(map(len, lines))[len(lines) * 19 // 20]  # a few may be longer, such as headings
    going_on = sum(
        0.85 * width <= len(line) <= 1.1 * width
        and (unicodedata.category(line[-1])[0] in "LMN" or line[-1] in ",;:-—،、，")
        and following[0].isalpha()
        and not following[0].isupper()
        for line, following in pairwise(lines)
    )
    return width if 20 <= width <= 200 and 5 * going_on > 2 * len(lines) else 0


def is_not_latin(text: str) -> bool:
    """Tell whether most letters are of other scripts than the Latin one."""
    letters = Counter(filter(str.isalpha, text))
    latin = sum(n for c, n in letters.items() if unicodedata.name(c, "").startswith("LATIN"))
    return 2 * latin < letters.total()


def check_corpus(stats: list[dict], config: DataConfig, groups: list[list[FileChunk]]) -> None:
    for i, source in enumerate(config.corpus.each_source()):
        own = [s for s, group in zip(stats, groups, strict=True) if group[0].source == i]
        bad = sum(s["rejects"].get(BAD_ROWS, 0) for s in own)
        rows = bad + sum(s["rejects"].get("empty", 0) + s["read"] for s in own)
        if bad > MOST_BAD * rows:
            raise UserError(
                f"{bad:,} of {rows:,} rows of {name_source(source)} are bad, more than "
                f"{MOST_BAD:.0%}; set corpus.on_bad_row=stop to see one, and correct "
                "corpus.text_field or the file"
            )
        if sum(s["train"]["words"] + s["held_out"]["words"] for s in own) == 0:
            what = f"corpus.sources[{i}]" if config.corpus.sources else "the corpus"
            causes = sum((Counter(s["rejects"]) for s in own), Counter())
            raise UserError(
                f"{what} holds no text ({name_source(source)}; left out: {left_out(causes)}); "
                "correct the section corpus"
            )
    documents, held_out = (sum(s[x]["documents"] for s in stats) for x in SPLITS)
    if not documents:
        them = "the only document is" if held_out == 1 else f"all {held_out:,} documents are"
        raise UserError(
            f"{them} held out, so none is left to train on; lower corpus.held_out_fraction, or "
            "add text"
        )
    if config.data.objective == "nsp" and documents < 2:
        raise UserError(
            "next-sentence prediction needs at least two documents, since a random B comes from "
            f"another document; the corpus has {documents} to train on (layout "
            f"{groups[0][0].layout}). Set corpus.layout if documents are separated in another "
            "way, add text, or set data.objective=sop or none"
        )


def plan_encoding(work: Work) -> Plan:
    plan = []
    for i, (scan, shard) in enumerate(zip(work.scans, work.shards, strict=True)):
        arguments = scan, shard, work.vocab_dir
        plan.append((shard, Task(encode_scan, arguments, f"shard-{i:05d}", work.stats[i]["bytes"])))
    return plan


def write_store(work: Work) -> None:
    """Assemble the token store, and remove all other results."""
    sources = describe_sources(work.corpus, work.groups, work.stats, work.shards)
    store_dir = work.data_dir / "store"
    manifest = assemble_store(
        work.shards, store_dir, work.stats, sources, work.settings, work.vocab_dir
    )
    remove_entries(work.folder, is_work)
    print_store(manifest)
    warn_store(manifest, work.config.data.objective)
    encode_probes(work)


def encode_probes(work: Work) -> None:
    """Encode the probes of `eval.probes`, if there are any."""
    if work.pairs or work.probes.sentences:
        write_probes(work.data_dir, work.probes, work.pairs)


def group_task(
    function: Callable, group: list[FileChunk], out: Path, *arguments
) -> tuple[Path, Task]:
    """Make a task that calls a function (group, out, *arguments); its size is in bytes."""
    first, *others = group
    name = first.path + (f" from byte {first.start:,}" if first.version and first.start else "")
    name += f" and {len(others)} more" if others else ""
    size = sum(chunk.size for chunk in group)
    if first.version:  # files, and not a dataset
        group = [replace(c, path=os.path.abspath(c.path)) for c in group]  # for other folders
    return out, Task(function, (group, out, *arguments), f"{out.name[17:]} ({name})", size)


@dataclass(frozen=True)
class Stage:
    """A stage of preparation: a row of `STAGES`. A job array does one at a time."""

    verb: str  # of the progress bar
    purpose: str  # what an array is run for
    done: str  # what an array task says at its end
    plan: Callable[[Work], Plan]
    join: Callable[[Work], None]  # when all tasks are done: makes one result of theirs
    is_complete: Callable[[Work], bool]


STAGES = (
    Stage("comparing", "compare it", "compared", plan_comparing, write_earlier, is_compared),
    Stage("reading", "read the text", "read", plan_reading, write_vocab, is_read),
    Stage(
        "encoding", "encode the words", "encoded", plan_encoding, write_store, lambda work: False
    ),
)
