#!/usr/bin/env bash
# From raw text to a filled [MASK]: bash scripts/quickstart.sh [FILE...] [key=value...]
# Without FILEs it trains on the prose of the installed Python packages; with FILEs, on those.
# key=value changes a field of configs/quickstart.yaml.
set -euo pipefail
files=() overrides=()
for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then sed -n '2,4s/^# //p' "$0"; exit; fi
    if [[ $word =~ ^[a-z0-9_.]+= && ! -e $word ]]; then overrides+=("$word"); continue; fi
    if [[ ! -e $word && $word != *[*?[]* ]]; then echo "error: no file at $word; give files of text, or key=value" >&2; exit 2; fi
    files+=("$(realpath -- "$word")")
done
EXTRAS=hf
source "$(dirname "$0")/setup.sh"

name=quickstart
if [ ${#files[@]} -gt 0 ]; then
    name=quickstart-$(printf '%s\n' "${files[@]}" | cksum | cut -d' ' -f1)
    list=$(printf '"%s",' "${files[@]}")
    overrides=(corpus.builtin=null "corpus.files=[${list%,}]" ${overrides[@]+"${overrides[@]}"})
fi
# the folders come first, so that a data_dir or run_dir among the arguments wins
overrides=("data_dir=data/$name" "run_dir=runs/$name" ${overrides[@]+"${overrides[@]}"})
for word in "${overrides[@]}"; do
    case $word in
    data_dir=*) data_dir=${word#*=} ;;
    run_dir=*) run_dir=${word#*=} ;;
    esac
done

python -m data_pipeline configs/quickstart.yaml "${overrides[@]}"
python -m pretrain configs/quickstart.yaml "${overrides[@]}"
python scripts/try_held_out.py "$run_dir/export" "$data_dir"
echo "A Hugging Face folder is in $run_dir/export; the losses are in $run_dir/metrics.jsonl"
