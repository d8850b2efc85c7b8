"""Compare the project's speed, memory and model quality with its peers':

python scripts/benchmark.py {data,loader,model,all} [--config CONFIG] [--files FILE ...] [--runs N]
                            [--device cpu|cuda] [--sizes tiny ...] [--threads N]
python scripts/benchmark.py learn [--config CONFIG] [--minutes 20]
python scripts/benchmark.py sentences --rules FOLDER

Prints one JSON line per figure: `ours` and `peer` are medians over `runs` alternating runs after a
warm-up, `ratio` says how many times better ours is, and `spread` is (max - min) / median of each.
Single-threaded work is measured in CPU time, the rest (`threads` above 1) in wall time. Padding
never counts as tokens.
"""

import argparse
import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # before their imports

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import bench_data
import bench_learn
import bench_model
import torch
from bench_figures import ROOT

from data_pipeline.common.errors import check, run_command
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from data_pipeline.corpus.readers import Rejects, read_documents
from data_pipeline.corpus.sources import list_file_chunks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("data", "loader", "model", "learn", "all", "sentences"))
    parser.add_argument("--config", default=str(ROOT / "configs/quickstart.yaml"))
    parser.add_argument("--files", nargs="+", help="the corpus, instead of the config's")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of model")
    parser.add_argument("--sizes", nargs="+", choices=bench_model.SIZES, help="of model")
    parser.add_argument("--threads", type=int, default=1, help="of model on a CPU")
    parser.add_argument("--minutes", type=float, default=20.0, help="of learn, on one core")
    parser.add_argument("--rules", help="golden rules: LANGUAGE.json, of {text, sentences} each")
    args = parser.parse_args()
    for name in ("runs", "threads"):
        check(getattr(args, name) > 0, f"--{name} {getattr(args, name)}: wanted 1 or more")
    check(
        args.device == "cpu" or torch.cuda.is_available(), "--device cuda: there is no GPU; use cpu"
    )
    if args.what == "sentences":
        return bench_data.measure_sentences(Path(args.rules or "."))
    config = load_config(DataConfig, args.config)
    if args.what == "learn":
        return bench_learn.measure_learning(config, args.config, args.minutes)
    if args.files:
        config = with_files(config, args.files)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        config = as_one_file(config, Path(folder))
        if args.what in ("data", "all"):
            bench_data.measure_data(config, args.runs)
        if args.what in ("loader", "all"):
            bench_data.measure_loader(config, args.runs)
        if args.what in ("model", "all"):
            usual = {"cpu": ("tiny", "mini", "small"), "cuda": ("base", "large")}[args.device]
            bench_model.measure_model(
                config, args.sizes or usual, args.device, args.threads, args.runs
            )


def as_one_file(config: DataConfig, folder: Path) -> DataConfig:
    """Write the corpus to one plain text file and return a config that uses it.

    The peers can read that file, and no decompression is measured.
    """
    rejects, path, sources = Rejects(), folder / "corpus.txt", config.corpus.each_source()
    with open(path, "w", encoding="utf-8") as file:
        for chunk in list_file_chunks(config.corpus):
            for document in read_documents(chunk, sources[chunk.source], rejects):
                file.write(document + "\n\n")
    config = with_files(config, str(path))
    corpus = replace(config.corpus, layout="blank_line", encoding="utf-8")
    return replace(config, corpus=corpus, data_dir=str(folder / "data"))


def with_files(config: DataConfig, files: str | list[str]) -> DataConfig:
    """Return a config whose corpus is these files alone."""
    corpus = replace(config.corpus, builtin=None, dataset=None, files=files, sources=[])
    return replace(config, corpus=corpus)


if __name__ == "__main__":
    run_command(main)
