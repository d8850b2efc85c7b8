"""The peers of `benchmark.py`, as commonly set up, and a reimplementation of google-research/bert's
`create_pretraining_data.py` from a description of its rules.

`python scripts/bench_peers.py SIZE MIN_FREQUENCY LOWERCASE FILE` trains a vocabulary with
`tokenizers`.
"""

import random
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Document = list[list[str]]  # sentences of pieces


def train_tokenizers_wordpiece(path: str, size: int, min_frequency: int, lowercase: bool) -> None:
    """Run WordPieceTrainer on raw text, with BERT's normaliser and pre-tokeniser."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    tokenizer.train([path], trainer)


# --- transformers ---------------------------------------------------------------------------------


def collator(vocab_dir: Path, return_tensors: str):
    """Build transformers' whole-word collator, which supports [MASK] as the only replacement."""
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(
        BertTokenizerFast.from_pretrained(vocab_dir),
        whole_word_mask=True,
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
        return_tensors=return_tensors,
    )


def padded_examples(batch, continues: np.ndarray, length: int) -> Iterator[dict[str, list]]:
    """Convert an unmasked batch for that collator: padded, with character offsets.

    Offsets are made up: one character per token and one between words.
    """
    edges = batch.cu_seqlens.tolist()
    for start, end in zip(edges, edges[1:], strict=False):
        ids, types = batch.input_ids[start:end].numpy(), batch.token_type_ids[start:end]
        rest = [0] * (length - len(ids))
        special = np.isin(ids, (2, 3))
        place = np.cumsum(np.where(continues[ids], 1, 2))
        offsets = np.where(special[:, None], 0, np.stack([place, place + 1], 1))
        yield {
            "input_ids": ids.tolist() + rest,
            "token_type_ids": types.tolist() + rest,
            "attention_mask": [1] * len(ids) + rest,
            "special_tokens_mask": special.astype(int).tolist() + [1] * len(rest),
            "offset_mapping": offsets.tolist() + [[0, 0]] * len(rest),
        }


# --- google-research/bert -------------------------------------------------------------------------


def basic_words(text: str) -> list[str]:
    """Split text as BERT's basic tokenizer does, lower-cased and without accents."""
    out = []
    for character in text:
        code, kind = ord(character), unicodedata.category(character)
        if code in (0, 0xFFFD) or (kind in ("Cc", "Cf") and character not in "\t\n\r"):
            continue
        chinese = 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF
        space = character in " \t\n\r" or kind == "Zs"
        out.append(f" {character} " if chinese else " " if space else character)
    words = []
    for word in "".join(out).split():
        plain = unicodedata.normalize("NFD", word.lower())
        word, open_ = "".join(c for c in plain if unicodedata.category(c) != "Mn"), False
        for character in word:
            code = ord(character)
            mark = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
            if mark or unicodedata.category(character).startswith("P"):
                words.append(character)
                open_ = False
            elif open_:
                words[-1] += character
            else:
                words.append(character)
                open_ = True
    return words


def greedy_pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    """Split a word into WordPiece tokens by longest match first; [UNK] if that fails."""
    if len(word) > 200:
        return ["[UNK]"]
    pieces, start = [], 0
    while start < len(word):
        end, found = len(word), None
        while start < end:
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                found = piece
                break
            end -= 1
        if found is None:
            return ["[UNK]"]
        pieces.append(found)
        start = end
    return pieces


def original_examples(
    documents: list[list[str]], vocabulary: dict[str, int], length: int, rng: random.Random
) -> Iterator[dict[str, list[int]]]:
    """Yield the examples of one pass over documents: pairs, static whole-word masks, padding."""
    tokenized = []
    for document in documents:
        sentences = [
            [p for word in basic_words(sentence) for p in greedy_pieces(word, vocabulary)]
            for sentence in document
        ]
        tokenized.append([sentence for sentence in sentences if sentence])
    tokenized = [document for document in tokenized if document]
    rng.shuffle(tokenized)
    pieces = list(vocabulary)
    for number in range(len(tokenized)):
        for a, b, is_random in original_pairs(tokenized, number, length - 3, rng):
            tokens = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
            types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
            masked, labels = original_masks(tokens, pieces, rng)
            rest = [0] * (length - len(tokens))
            yield {
                "input_ids": [vocabulary[token] for token in tokens] + rest,
                "token_type_ids": types + rest,
                "attention_mask": [1] * len(tokens) + rest,
                "masked_positions": masked,
                "masked_labels": [vocabulary[label] for label in labels],
                "next_sentence_label": [int(is_random)],
            }


def original_pairs(
    documents: list[Document], number: int, room: int, rng: random.Random
) -> Iterator[tuple[list[str], list[str], bool]]:
    """Yield (A, B, is B random) of a document; sentences that a random B replaced are reused."""
    document = documents[number]
    target = rng.randint(2, room) if rng.random() < 0.1 else room
    chunk: Document = []
    size = i = 0
    while i < len(document):
        chunk.append(document[i])
        size += len(document[i])
        if i == len(document) - 1 or size >= target:
            a_end = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = [token for sentence in chunk[:a_end] for token in sentence]
            b: list[str] = []
            is_random = len(chunk) == 1 or rng.random() < 0.5
            if is_random:
                for _ in range(10):
                    other = rng.randrange(len(documents))
                    if other != number:
                        break
                start = rng.randrange(len(documents[other]))
                for sentence in documents[other][start:]:
                    b += sentence
                    if len(b) >= target - len(a):
                        break
                i -= len(chunk) - a_end
            else:
                b = [token for sentence in chunk[a_end:] for token in sentence]
            while len(a) + len(b) > room:
                longer = a if len(a) > len(b) else b
                del longer[0 if rng.random() < 0.5 else -1]
            yield a, b, is_random
            chunk, size = [], 0
        i += 1


def original_masks(
    tokens: list[str], pieces: list[str], rng: random.Random
) -> tuple[list[int], list[str]]:
    """Mask about 15 % of the tokens in place, by whole words in random order.

    Returns positions and labels.
    """
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in ("[CLS]", "[SEP]"):
            continue
        if words and token.startswith("##"):
            words[-1].append(place)
        else:
            words.append([place])
    rng.shuffle(words)
    budget, chosen = max(1, round(len(tokens) * 0.15)), []
    for word in words:
        if len(chosen) >= budget:
            break
        if len(chosen) + len(word) <= budget:
            chosen += word
    chosen.sort()
    labels = [tokens[place] for place in chosen]
    for place in chosen:
        if rng.random() < 0.8:
            tokens[place] = "[MASK]"
        elif rng.random() < 0.5:
            tokens[place] = rng.choice(pieces)
    return chosen, labels


if __name__ == "__main__":
    train_tokenizers_wordpiece(sys.argv[4], int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
