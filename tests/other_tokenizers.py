"""Tokenizers of other kinds than BERT's, trained on a text: RoBERTa's and ALBERT's."""

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROBERTAS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ALBERTS = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def train_byte_level(text: str) -> Tokenizer:
    """RoBERTa's kind: byte-level BPE, the space before a word in its first piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=ROBERTAS[:4],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>"))
    )
    return tokenizer


def train_unigram(text: str) -> Tokenizer:
    """ALBERT's kind: SentencePiece's unigram model, in lower case."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=ALBERTS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer  # without a post-processor, as some are


KINDS = {"byte-level BPE": train_byte_level, "unigram": train_unigram}
