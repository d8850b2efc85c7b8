"""The peers of `benchmark.py`, as commonly set up, and google-research/bert's
`create_pretraining_data.py`, from a description of its rules: text to pieces here, pairs and masks
by `tests/google_rule.py`.

`python scripts/bench_peers.py SIZE MIN_FREQUENCY LOWERCASE FILE` trains a vocabulary with
`tokenizers`.
"""

import random
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np


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


def peer_model(model, vocab_size: int, attention: str = "sdpa"):
    """Build transformers' `BertForPreTraining` with the sizes and weights of a model of ours."""
    from transformers import BertConfig, BertForPreTraining

    from pretrain.families import hf_config

    settings = hf_config(asdict(model.config), vocab_size, model.hf_class)
    found = BertForPreTraining(BertConfig(**settings, attn_implementation=attention))
    found.load_state_dict(model.config.family.to_hf(model.state_dict()), strict=False)
    return found


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
    for start, end in pairwise(batch.cu_seqlens.tolist()):
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
        follows_letter = False
        for character in (c for c in plain if unicodedata.category(c) != "Mn"):
            code = ord(character)
            mark = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
            mark = mark or unicodedata.category(character).startswith("P")
            if follows_letter and not mark:
                words[-1] += character
            else:
                words.append(character)
            follows_letter = not mark
    return words


def greedy_pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    """Split a word into WordPiece tokens by longest match first; [UNK] if that fails."""
    if len(word) > 200:
        return ["[UNK]"]
    pieces, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                break
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


def original_examples(
    documents: list[list[str]], vocabulary: dict[str, int], length: int, rng: random.Random
) -> Iterator[dict[str, list[int]]]:
    """Yield the examples of one pass over documents: pairs, static whole-word masks, padding."""
    # imported here, because the memory of the trainer above is measured
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from google_rule import google_pairs, mask

    ids: list[int] = []
    spans = []  # the tokens of each sentence, by document
    for document in documents:
        ends = [len(ids)]
        for sentence in document:
            for word in basic_words(sentence):
                ids += [vocabulary[piece] for piece in greedy_pieces(word, vocabulary)]
            ends.append(len(ids))
        spans.append([(start, end) for start, end in pairwise(ends) if start < end])
    continues = [piece.startswith("##") for piece in vocabulary]
    pairs = google_pairs([document for document in spans if document], length, 0.1, rng)
    for a_start, a_end, b_start, b_end, label in pairs.tolist():
        a, b = ids[a_start:a_end], ids[b_start:b_end]
        tokens = [2, *a, 3, *b, 3]
        seen, masked = mask(tokens, continues, length, rng)
        places = [place for place, is_masked in enumerate(masked) if is_masked]
        rest = [0] * (length - len(tokens))
        yield {
            "input_ids": seen + rest,
            "token_type_ids": [0] * (len(a) + 2) + [1] * (len(b) + 1) + rest,
            "attention_mask": [1] * len(tokens) + rest,
            "masked_positions": places,
            "masked_labels": [tokens[place] for place in places],
            "next_sentence_label": [label],
        }


if __name__ == "__main__":
    train_tokenizers_wordpiece(sys.argv[4], int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
