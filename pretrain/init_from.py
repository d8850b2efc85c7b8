"""Start training from a Hugging Face folder, of transformers or of an export; the reverse of
`pretrain.export`.

Encoder and heads keep their tensors bit for bit. Rows of the vocabulary are matched by piece, so
that the run may have another vocabulary, such as an extended one.
"""

import re
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile, is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.common.errors import UserError, check
from data_pipeline.common.folders import hash_file
from data_pipeline.common.reading import COUNT, check_regular, read_json, read_utf8
from data_pipeline.sampling.vocabulary import OTHER_NAMES, Vocabulary, list_pieces
from pretrain.config import ModelConfig
from pretrain.families import read_hf_config, read_settings
from pretrain.models.bert import PretrainingModel
from pretrain.models.electra import GENERATOR

ADVICE = "put an intact copy there"
LFS = b"version https://git-lfs"  # start of the stub for a large file in a clone without Git LFS
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that exists is used
HEADS = ("mlm.", "pooler.", "nsp.", "rtd.")  # a folder may lack them
PER_PIECE = ("embeddings.word.weight", "mlm.bias")  # a row for each piece
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RENAMED = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in folders from TensorFlow
BUFFERS = re.compile(r"\.(position_ids|token_type_ids)$")
SAME = ("hidden_size", "intermediate_size", "embedding_size", "type_vocab_size")
SAME += ("max_position_embeddings", "num_hidden_groups")  # the number of layers may be smaller
SAME += ("num_attention_heads", "hidden_act", "layer_norm_eps")  # not visible in tensor shapes
TIED = re.compile(r"(decoder|generator_lm_head)\.(weight|bias)$")


def start_from(
    folder: str | Path, model: PretrainingModel, pieces: list[str]
) -> tuple[list[str], list[str]]:
    """Copy the weights of a folder into a new model of the same family.

    The generator of an ELECTRA is in a folder of its own inside, or starts at random.
    pieces: of the run's vocabulary, by id.
    Returns lines that say what was used, and the names of the heads that start at random, such as
    "nsp". Raises `UserError` if the folder does not fit.
    """
    folder, lines, given, new_heads = Path(folder).expanduser(), [], [], []
    for name, part in reversed(model.parts().items()):  # shared embeddings come from the first
        if name and not (folder / name).is_dir():
            lines.append(f"no {folder / name}, so the {name} starts at random")
        else:
            # RoBERTa counts positions from the id of padding
            first = ("pad_token_id",) if part.config.family.counts_from_pad else ()
            check_same(folder / name, part.config, first + SAME)
            line, new_heads = copy_weights(folder / name, part, pieces)  # last of the whole model
            lines.append(line)
            if name:
                given = [tensor.clone() for tensor in part.embeddings.parameters()]
            elif not all(map(torch.equal, given, part.embeddings.parameters())):
                lines[0] += "; its embeddings are not used, since those of the model differ"
    return lines[::-1], new_heads


def copy_weights(folder: Path, model: PretrainingModel, pieces: list[str]) -> tuple[str, list[str]]:
    """Copy the weights of a folder into a model that transformers has a class for.

    Heads that the folder lacks stay as they are. A piece that the folder's vocabulary lacks gets
    the mean of the rows of the pieces that it is split into there, and so does its bias; a special
    piece such as [unused7] keeps its random row.

    Returns a line that says what was used, and the names of those heads.
    """
    family, state = model.config.family, model.state_dict()
    weights = to_current_names(read_weights(folder), family.encoder)
    names = {name: family.hf_name(name) for name in state}
    fresh = [name for name in state if names[name] not in weights and name.startswith(HEADS)]
    missing = [names[name] for name in state if names[name] not in weights and name not in fresh]
    check(
        not missing,
        f"init_from {folder} lacks {' and '.join(missing[:2])}, which a model of the config "
        "has; lower model.num_hidden_layers, or put the files of one model there",
    )
    words = weights[names["embeddings.word.weight"]]
    own = read_pieces(folder)
    if own is None and folder.name == GENERATOR:  # it has the vocabulary of the model around it
        own = read_pieces(folder.parent)
    sources = find_sources(own, pieces, folder, len(words))
    for name, ours in state.items():
        if name in fresh:
            continue
        value = weights.pop(names[name])
        check(
            value.dtype in FLOATS,
            f"init_from {folder} has {names[name]} in {str(value.dtype).removeprefix('torch.')}; "
            "give weights that are not quantized",
        )
        value = value.to(ours.dtype)
        is_carried = name in PER_PIECE and sources is not None  # row by row, from as many as it has
        check(
            value.shape[is_carried:] == ours.shape[is_carried:],
            f"init_from {folder} has {names[name]} of {describe_shape(value)}, but its config.json "
            f"makes it {describe_shape(ours)}; put the files of one model there",
        )
        ours.copy_(carry_rows(value, sources, ours) if is_carried else value)
    check_tied(weights, words, folder)
    new_heads = list(dict.fromkeys(name.partition(".")[0] for name in fresh))
    return describe(folder, new_heads, weights, sources), new_heads


def describe(
    folder: Path, new_heads: list[str], unused: dict[str, Tensor], sources: list[list[int]] | None
) -> str:
    """Describe in a line what was used from a folder and what not."""
    line = f"starts from {folder}"
    if new_heads:
        line += f"; not in it and started at random: {', '.join(new_heads)}"
    unused = [name for name in unused if not TIED.search(name)]
    if unused:
        line += f"; not used: {', '.join(unused[:3])}{' ...' if len(unused) > 3 else ''}"
    if sources is not None:
        kept, new = sum(len(s) == 1 for s in sources), sum(len(s) > 1 for s in sources)
        line += f"; {kept:,} pieces of its vocabulary, and {new:,} new ones as means of these"
        if unknown := len(sources) - kept - new:
            line += f"; {unknown:,} start at random"
    return line


def describe_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


# ------------------------------------------------------------------------------------ the folder


def list_weights(folder: Path) -> list[Path]:
    """List the files of a folder's weights, several if they are sharded.

    Prefers safetensors. Raises `UserError` if there are none.
    """
    check(
        folder.is_dir(),
        f"init_from {folder} is not a folder; download a model from a hub into one, and give that",
    )
    for name in WEIGHTS:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            parts = read_json(index, {"weight_map": {str: str}}, ADVICE)["weight_map"].values()
            return [folder / Path(part).name for part in sorted(set(parts))]
    raise UserError(
        f"init_from {folder} holds neither {' nor '.join(WEIGHTS)}; give a folder of transformers' "
        "save_pretrained, of a model hub, or an export of this project"
    )


def hash_weights(folder: Path) -> str:
    """Hash the weights of a folder, and of a generator in it; raises `UserError` if there are
    none."""
    paths = list_weights(folder)
    if (folder / GENERATOR).is_dir():
        paths += list_weights(folder / GENERATOR)
    gone = [path.name for path in paths if not path.exists()]
    check(not gone, f"init_from {folder} lacks {', '.join(gone[:2])}, which its index lists")
    hashes = [hash_file(path) for path in paths]
    return hashes[0] if len(paths) == 1 else sha256("".join(hashes).encode()).hexdigest()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a folder, by transformers' names; pickles by `weights_only`.

    Raises `UserError` if they are damaged, or take more memory than their files have bytes.
    """
    weights, size = {}, 0
    for path in list_weights(folder):
        size += check_regular(path)
        try:
            if path.suffix == ".safetensors":
                weights |= load_file(path)
            else:
                check(not is_packed(path), "it is compressed, as torch never writes files")
                weights |= torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # of many kinds: somebody else wrote the file
            reason = " ".join(str(error).split())[:150]
            with open(path, "rb") as file:
                if file.read(len(LFS)) == LFS:
                    reason = "a pointer of Git LFS; fetch the file itself with git lfs pull"
            if reason.startswith("Weights only load failed"):  # and goes on with how to run it
                reason = "a pickle that holds more than tensors, and could run code"
            raise UserError(f"{path} is damaged, or not a file of weights: {reason}") from None
    for name, value in weights.items():
        is_sound = isinstance(name, str) and isinstance(value, Tensor) and value.nbytes <= size
        if is_sound and value.dtype in FLOATS:
            is_sound = value.isfinite().all()
        check(is_sound, f"init_from {folder}: {name} is not a tensor of finite numbers; {ADVICE}")
    return weights


def is_packed(path: Path) -> bool:
    """Tell whether a pickle of torch unpacks to more than its file has bytes."""
    if not is_zipfile(path):  # of torch before 1.6
        return False
    with ZipFile(path) as file:
        return sum(item.file_size for item in file.infolist()) > path.stat().st_size


def to_current_names(weights: dict[str, Tensor], encoder: str) -> dict[str, Tensor]:
    """Rename tensors to transformers' present names in a model with heads.

    encoder: how the names of the encoder begin there; a bare encoder was saved without.
    """
    bare = not any(name.startswith(encoder) for name in weights)
    found = {}
    for name, tensor in weights.items():
        for old, new in RENAMED.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        name = encoder + name if bare else name
        if not BUFFERS.search(name):
            found[name] = tensor
            if name.endswith("decoder.bias"):  # some folders have the MLM bias under this name only
                found.setdefault(name.replace("decoder.bias", "bias"), tensor)
    return found


def check_same(folder: Path, config: ModelConfig, names: tuple[str, ...]) -> None:
    """Raise `UserError` if a model differs from the folder in one of the settings `names`: the
    weights would compute something else."""
    path = folder / "config.json"
    found = read_hf_config(read_settings(folder), path) if path.exists() else {}
    for name in names:
        value, ours = found.get(name), getattr(config, name)
        advice = f"remove model.{name}, since the folder sets it"
        if folder.name == GENERATOR:
            advice = "move this folder away, so that a new generator starts at random"
        check(value in (None, ours), f"{path}: {name} is {value}, but {ours} in this run; {advice}")


def check_tied(weights: dict[str, Tensor], words: Tensor, folder: Path) -> None:
    """Raise `UserError` if a folder's decoder is not tied to its word embeddings."""
    for name, tensor in weights.items():
        check(
            not TIED.search(name) or name.endswith("bias") or torch.equal(tensor, words),
            f"init_from {folder}: {name} is not the matrix of word embeddings, as it has to be "
            "here; give a model whose decoder is tied",
        )


# -------------------------------------------------------------------------------- the vocabulary


def read_pieces(folder: Path) -> list[str] | None:
    """Read the pieces of a folder's vocabulary, by id; None if it has no vocabulary.

    Reads files, not a tokenizer, since training loads none.
    """
    text, tokenizer = folder / "vocab.txt", folder / "tokenizer.json"
    if text.exists():
        lines = read_utf8(text, ADVICE).replace("\r\n", "\n")
        return lines.removesuffix("\n").split("\n")
    if not tokenizer.exists():
        return None
    shape = {"model": {"vocab": ({str: COUNT}, [[(str, float)]])}}
    shape["added_tokens?"] = [{"content": str, "id": COUNT}]
    ids = list_pieces(read_json(tokenizer, shape, ADVICE))
    return sorted(ids, key=ids.get)


def find_sources(
    old: list[str] | None, new: list[str], folder: Path, rows: int
) -> list[list[int]] | None:
    """Find for each new piece the old ids whose mean becomes its row; none for a special piece
    without a counterpart there.

    rows: number of the folder's word embeddings, which may be padded at the end to a multiple of 8.
    Returns None if the vocabularies are equal, and no row is padding.
    Raises `UserError` if the folder's vocabulary does not fit its embeddings.
    """
    padding = rows - len(old or new)
    is_padded = 0 < padding < 128 and rows % 8 == 0
    check(
        padding == 0 or is_padded and not (folder / "added_tokens.json").exists(),
        f"init_from {folder} has {rows:,} word embeddings, but "
        f"{'its' if old else 'no vocabulary, and the'} vocabulary "
        f"{'has' if old else 'of the run'} {len(old or new):,} pieces; give a folder whose files "
        "belong together",
    )
    if old in (None, new):
        return [[i] for i in range(len(new))] if padding else None
    ids = {piece: i for i, piece in enumerate(old)}
    twins = OTHER_NAMES | {theirs: ours for ours, theirs in OTHER_NAMES.items()}
    names = [piece if piece in ids else twins.get(piece, piece) for piece in new]
    inner = "##" if Vocabulary.of(old).begin is None else ""
    return [[ids[name]] if name in ids else split_piece(name, ids, inner) for name in names]


def split_piece(piece: str, ids: dict[str, int], inner: str = "##") -> list[int]:
    """Split a piece into the longest pieces of another vocabulary, from its start, as WordPiece
    splits a word: their ids; none for a special piece, and where a character is unknown.

    inner: mark of pieces inside a word; of byte-level BPE and SentencePiece "", as they mark the
    first one, whose mark counts as a character here.
    """
    found: list[int] = []
    if re.fullmatch(r"\[.+\]|<.+>", piece):
        return found
    mark, left = (inner, piece[2:]) if inner and piece.startswith(inner) else ("", piece)
    while left:
        end = next((n for n in range(len(left), 0, -1) if mark + left[:n] in ids), 0)
        if not end:
            return []
        found.append(ids[mark + left[:end]])
        mark, left = inner, left[end:]
    return found


def carry_rows(old: Tensor, sources: list[list[int]], fresh: Tensor) -> Tensor:
    """Compute the rows of a vocabulary as means of those of another, (V, ...).

    fresh: (V, ...), the rows of pieces without a source.
    """
    rows = fresh.clone()
    for row, ids in zip(rows, sources, strict=True):
        if ids:
            row.copy_(old[ids].mean(0))
    return rows
