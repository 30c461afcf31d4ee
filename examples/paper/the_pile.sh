#!/usr/bin/env bash
# Downloads the training data of the paper, The Pile (deduplicated), and GPT-2's vocabulary, and writes .bin/.idx files:
#
#   examples/paper/the_pile.sh FOLDER [FILES]
#
# Needs access to the Hugging Face hub, several hundred GB of disk for the
# download, as much again for the result (2 bytes a token), and `pip install ".[data,lab]"`. FILES limits
# the download to the files whose names match, such as 'data/train-0000*.parquet' for a first try.
#
# Interrupted downloads go on where they were; preprocessing starts anew and leaves no half files. Train on the
# result with
#
#   DATA=FOLDER/pile_text_document VOCAB=FOLDER/vocab.json MERGES=FOLDER/merges.txt \
#       examples/paper/run.sh accuracy 125M
set -euo pipefail

FOLDER=$1
FILES=${2:-data/*.parquet}

hf download openai-community/gpt2 vocab.json merges.txt --local-dir "$FOLDER"
hf download EleutherAI/the_pile_deduplicated --repo-type dataset --include "$FILES" --local-dir "$FOLDER/pile"

sdp4bit preprocess \
    --input "$FOLDER/pile/$FILES" \
    --output-prefix "$FOLDER/pile" \
    --vocab-file "$FOLDER/vocab.json" \
    --merge-file "$FOLDER/merges.txt" \
    --tokenizer-type GPT2BPETokenizer \
    --append-eod
