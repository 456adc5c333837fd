#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Expert iteration: in each round the newest model samples, the best responses are kept, and MODEL is trained on them.
# One round is rejection-sampling SFT. If it is killed, the same command continues.
#
#   MODEL=DIR DATA=train.jsonl REWARD=gsm8k ROUNDS=3 examples/expert_iteration.sh [KEY=VALUE of whet sft ...]
#
# Every round starts from MODEL, as in STaR (https://arxiv.org/abs/2203.14465) and ReST-EM
# (https://arxiv.org/abs/2312.06585): it does not add up the errors of earlier rounds.
set -euo pipefail

: "${MODEL:?the model to train}" "${DATA:?the prompts with their answers}" "${REWARD:?the reward function}"
: "${OUT:=runs/expert_iteration}" "${ROUNDS:=3}" "${SAMPLES:=8}" "${BEST_OF:=1}" "${MIN_SCORE:=1}"
: "${RECIPE:=expert_iteration}"  # of whet sft; its name or a file
: "${SAMPLING:=}"  # more words of whet generate and whet select
: "${WHET:=whet}"

newest=$MODEL
for round in $(seq "$ROUNDS"); do
    folder=$OUT/round_$round
    if [ ! -d "$folder/model" ]; then
        # shellcheck disable=SC2086  # words
        $WHET generate model.path="$newest" input="[$DATA]" output="$folder/samples.jsonl" rollout.n="$SAMPLES" \
            seed="$round" $SAMPLING
        [ -e "$folder/rows.jsonl" ] || $WHET select "$folder/samples.jsonl" model.path="$newest" \
            data.val_files="[$DATA]" reward.function="$REWARD" $SAMPLING --best-of "$BEST_OF" \
            --min-score "$MIN_SCORE" -o "$folder/rows.jsonl"
        $WHET sft "$RECIPE" model.path="$MODEL" data.train_files="[$folder/rows.jsonl]" trainer.run_dir="$folder/sft" "$@"
        rm -rf "$folder/exported"
        $WHET export "$folder/sft" "$folder/exported"
        mv "$folder/exported" "$folder/model"
    fi
    newest=$folder/model
done
echo "the model of the last round: $newest"
